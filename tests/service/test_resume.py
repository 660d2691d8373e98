"""Attaching, rewinding, checkpoints: what a resumed trainer gets."""

from __future__ import annotations

import concurrent.futures

import pytest

from replaybuf.errors import NotLeader
from replaybuf.kernel.decide.records import decide_attach, decide_rewind
from replaybuf.service.bodies.writer import Part
from replaybuf.service.run.served_run import Run
from replaybuf.store import EmbeddedServer, Store
from replaybuf.wire.batch import read_batch
from replaybuf.wire.config import StrategySpec
from replaybuf.wire.contract import AttachRequest
from tests.conftest import RunClient, ServeProcess, group
from tests.led_run import append, on_a_run, train

DEEP = {"name": "one-step-off-policy", "options": {"max_staleness": 10}}


def ready(run: RunClient, groups: int = 8, **config: object) -> int:
    """Create a run with one group per batch and some groups of version 0; attach."""
    run.put(batch={"groups_per_batch": 1, "seq_len": 64}, strategy=DEEP, **config)
    run.append(*(group(f"g{n}") for n in range(groups)))
    return run.attach()


def attach_alone(url: str, name: str) -> int:
    """Attach over a connection of its own; return the epoch."""
    client = RunClient(url, name)
    with client.http:
        return client.attach()


def conserved(run: RunClient) -> dict[str, int]:
    """Check conservation and return the counts."""
    groups = run.state()["groups"]
    evicted = sum(groups["evicted"].values())
    assert (
        groups["stored"]
        == groups["live"] + groups["in_batches"] + groups["retired"] + evicted + groups["dead_lettered"]
    )
    return {name: groups[name] for name in ("live", "in_batches", "retired")} | {"evicted": evicted}


def test_a_redelivered_history_is_the_same_bytes(run: RunClient) -> None:
    """Attaching at step 1 serves batches 1, 2, 3 again as they were, then goes on with new groups."""
    epoch = ready(run)
    bodies = run.train(epoch, range(4))
    epoch = run.attach(resume_step=1)
    assert run.state()["step"] == 1
    assert run.state()["published_version"] == 1
    assert run.train(epoch, range(1, 4)) == bodies[1:]
    assert run.get("batches/3/record").json()["groups"][0]["times_sampled"] == 1
    conserved(run)


def test_a_resampled_history_gives_the_uses_back(run: RunClient) -> None:
    """Voided batches are kept for the record; their groups are live again."""
    epoch = ready(run, groups=4)
    run.train(epoch, range(3))
    assert conserved(run)["live"] == 1
    epoch = run.attach(resume_step=1, on_resume="resample")
    assert conserved(run) == {"live": 3, "in_batches": 1, "retired": 0, "evicted": 0}
    assert run.get("batches/1/record").status_code == 404
    voided = run.get("batches/1/record", generation=0).json()
    assert (voided["state"], voided["groups"][0]["group_id"]) == ("voided", "g1")
    again = read_batch(run.batch(1, epoch).content).meta
    assert (again.generation, again.group_ids) == (1, ["g1"])


def test_groups_of_lost_versions_are_evicted_unless_a_redelivered_batch_holds_them(run: RunClient) -> None:
    """After a rewind to step 1 a live group of version 2 belongs to a policy that never was."""
    epoch = ready(run, groups=2)
    run.train(epoch, range(2))
    run.append(group("in batch 2", version=2), group("left", version=2))
    run.train(epoch, range(2, 3))
    epoch = run.attach(resume_step=1)
    assert run.state()["groups"]["evicted"] == {"lost_lineage": 1}
    assert read_batch(run.train(epoch, range(1, 3))[1]).meta.group_ids == ["in batch 2"]
    conserved(run)


def test_an_older_ticket_cannot_append_a_lost_version(run: RunClient) -> None:
    """A slow producer's rollout of the lost policy is refused even when its version number is published again."""
    epoch = ready(run, groups=3)
    run.train(epoch, range(2))
    ticket = run.post("tickets", producer="slow", count=1).json()["tickets"][0]["ticket"]
    epoch = run.attach(resume_step=0)
    run.train(epoch, range(2))
    for lost in (1, 2):
        assert run.append(group(None, ticket=ticket, version=lost))[0]["reason"] == "lost_lineage"
    assert run.append(group(None, ticket=ticket, version=0))[0]["status"] == "stored"


def test_another_world_size_packs_the_same_groups_again(run: RunClient) -> None:
    """The batch is the same; only its place on ranks changes."""
    run.put(batch={"groups_per_batch": 4, "seq_len": 16})
    run.append(*(group(f"g{n}", tokens=4 + n) for n in range(4)))
    epoch = run.attach()
    single = read_batch(run.batch(0, epoch).content)
    epoch = run.attach(dp_world_size=3)
    three = [read_batch(run.batch(0, epoch, dp_rank=rank).content) for rank in range(3)]
    assert {body.meta.batch_id for body in three} == {single.meta.batch_id}
    assert sum(body.meta.rollouts for body in three) == single.meta.rollouts == 8


def test_a_checkpoint_frees_what_no_resume_needs(run: RunClient) -> None:
    """Batches before it are retired and their bytes go; asking for them answers 410."""
    epoch = ready(run)
    run.train(epoch, range(4))
    assert run.post("checkpoints", epoch=epoch, step=3).json()["oldest_step"] == 3
    assert conserved(run) == {"live": 4, "in_batches": 1, "retired": 3, "evicted": 0}
    assert run.batch(1, epoch).status_code == 410
    assert run.get("groups/g1").json()["state"] == "retired"
    assert run.get("batches/1/record").json()["groups"][0]["group_id"] == "g1"


def test_of_concurrent_attaches_only_the_last_can_write(run: RunClient, service: ServeProcess) -> None:
    """Each gets an epoch of its own; the newest trains, the others are fenced."""
    run.put(batch={"groups_per_batch": 1})
    run.append(group("a"))
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        epochs = sorted(threads.map(lambda _: attach_alone(service.url, run.run), range(8)))
    assert epochs == list(range(1, 9))
    assert [run.batch(0, epoch).status_code for epoch in epochs] == [409] * 7 + [200]
    assert [run.ack(0, epoch).status_code for epoch in epochs] == [409] * 7 + [200]


def test_resuming_below_the_oldest_checkpoint_names_it(run: RunClient) -> None:
    """409 with the range of steps that can be resumed."""
    epoch = ready(run)
    run.train(epoch, range(4))
    run.post("checkpoints", epoch=epoch, step=2, keep=2)
    run.post("checkpoints", epoch=epoch, step=4, keep=2)
    response = run.post("attach", dp_world_size=1, resume_step=1)
    assert (response.status_code, response.json()["bound"]) == (409, [2, 4])
    assert run.post("attach", dp_world_size=1, resume_step=5).status_code == 409
    assert run.post("attach", dp_world_size=1, resume_step=2).status_code == 200


def test_a_checkpoint_beyond_the_acked_steps_is_refused(run: RunClient) -> None:
    """A trainer cannot resume where it has not been."""
    epoch = ready(run)
    run.train(epoch, range(1))
    response = run.post("checkpoints", epoch=epoch, step=2)
    assert (response.status_code, response.json()["bound"]) == (409, [0, 1])


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"dp_world_size": 0}, "dp_world_size"),
        ({"dp_world_size": 4097}, "dp_world_size"),
        ({"dp_world_size": 1, "on_resume": "skip"}, "on_resume"),
        ({"dp_world_size": 1, "seq_len": 64, "pad_to_multiple_of": 7}, "pad_to_multiple_of"),
        ({"dp_world_size": 1, "cost": {"linear": 0.0, "quadratic": 0.0}}, "cost"),
        ({"dp_world_size": 1, "cost": {"linear": 1.0, "quadratic": -1.0}}, "cost.quadratic"),
    ],
)
def test_a_layout_out_of_bounds_is_refused(run: RunClient, body: dict[str, object], name: str) -> None:
    """422, and the run stays with the trainer it had."""
    epoch = ready(run)
    response = run.post("attach", resume_step=0, **body)
    assert (response.status_code, response.json()["name"]) == (422, name)
    assert run.state()["epoch"] == epoch


def test_a_seq_len_below_a_batch_to_redeliver_is_rejected(run: RunClient) -> None:
    """409 names the batch and its longest rollout."""
    epoch = ready(run)
    run.train(epoch, range(1))
    response = run.post("attach", dp_world_size=1, resume_step=0, seq_len=4)
    assert (response.status_code, response.json()["bound"]) == (409, 5)


def test_with_truncation_a_seq_len_below_a_prompt_to_redeliver_is_rejected(run: RunClient) -> None:
    """409 names the batch and how short its longest rollout can be cut; rows that leave a token of it are taken."""
    run.put(batch={"groups_per_batch": 1, "seq_len": 16, "overlong": "truncate"})
    run.append(group("a", tokens=9))
    epoch = run.attach()
    assert run.batch(0, epoch).status_code == 200
    response = run.post("attach", resume_step=0, seq_len=2)
    assert (response.status_code, response.json()["bound"]) == (409, 3)
    assert run.state()["epoch"] == epoch
    epoch = run.attach(resume_step=0, seq_len=3)
    assert read_batch(run.batch(0, epoch).content).meta.tokens == 2 * 3


def test_a_resume_at_the_next_step_chooses_a_prefetched_batch_anew(run: RunClient) -> None:
    """No step is trained again, but with `resample` no batch that nobody trained stays."""
    epoch = ready(run)
    run.train(epoch, range(1))
    bodies = [run.batch(step, epoch).content for step in (1, 2)]
    run.ack(1, epoch)
    epoch = run.attach(resume_step=2)
    assert run.batch(2, epoch).content == bodies[1]
    generation = run.state()["generation"]
    run.attach(resume_step=2, on_resume="resample")
    state = run.state()
    assert (state["step"], state["generation"]) == (2, generation + 1)


def test_a_follower_serves_no_batch_that_the_rewind_of_its_attach_takes_back(server: EmbeddedServer) -> None:
    """Two ranks at two servers would train different batches: ATTACH reaches a follower before REWIND does."""

    async def work(store: Store, run: Run) -> None:
        await append(run, *(f"g{n}" for n in range(2)))
        await train(run, (await run.trainer_calls.attach(AttachRequest())).epoch, range(2))
        request = AttachRequest(resume_step=1, on_resume="resample")
        async with run.journal.decision():
            attached = decide_attach(run.state, request, 0.0)
            await run.journal.append(attached)
            follower = await Run.load(run.name, store)
            assert follower
            rewind = decide_rewind(run.state, 1, "resample", 0.0)
            with pytest.raises(NotLeader):
                await follower.batches.part(1, attached.epoch, 0, 0.0)
            await run.journal.append(rewind)
        await follower.read_streams()
        with pytest.raises(NotLeader):
            await follower.batches.part(1, attached.epoch, 0, 0.0)
        assert isinstance(await run.batches.part(1, attached.epoch, 0, 0.0), Part)
        await follower.read_streams()
        assert isinstance(await follower.batches.part(1, attached.epoch, 0, 0.0), Part)

    on_a_run(server, work, strategy=StrategySpec("one-step-off-policy", {"max_staleness": 10}))
