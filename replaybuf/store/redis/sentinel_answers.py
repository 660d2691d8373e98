"""What sentinels answer, and what their answers together mean. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from replaybuf.errors import counted
from replaybuf.store.redis.server import text

Address = tuple[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What one sentinel says of a name.

    - `primary`: its address; None if the sentinel does not know the name, but `names`, or refused to answer (`refusal`)
    - `epoch`: of the configuration that names it
    - `down`, `failing_over`: this sentinel misses the primary; a failover has begun
    - `sentinels`: so many watch it, this one included; `quorum`: so many must agree that it is down
    - `replicas`: those that are not down; `down_after_s`: a server that is silent for longer is down
    """

    primary: Address | None
    epoch: int = 0
    down: bool = False
    failing_over: bool = False
    sentinels: int = 1
    quorum: int = 1
    replicas: int = 0
    down_after_s: float = 0.0
    names: tuple[str, ...] = ()
    refusal: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """What all answers mean.

    - `primary`: None if no sentinel named it
    - `trouble`: what keeps it from answering, if it does not; None = nothing
    - `down`: no call is tried: most sentinels report it down, or a failover has begun
    - `replicas`, `down_after_s`: as in an answer, the highest of all
    """

    primary: Address | None
    trouble: str | None = None
    down: bool = False
    replicas: int = 0
    down_after_s: float = 0.0


def combine(answers: Sequence[Answer], asked: int, name: str, failure: str = "") -> View:
    """Find the primary in the answers of `asked` sentinels: a minority may not have heard of the last failover.

    `failure`: why the last one that was asked did not answer.
    """
    known = [answer for answer in answers if answer.primary]
    if not answers:
        return View(None, f"none of {counted(asked, 'sentinel')} answers{failure and f' ({failure})'}")
    if not known:
        if refusals := sorted({answer.refusal for answer in answers if answer.refusal}):
            return View(None, f"these are not sentinels, or they refuse to answer: {'; '.join(refusals)}")
        names = sorted({other for answer in answers for other in answer.names})
        return View(None, f"Sentinel does not know the name {name!r}; it knows {', '.join(names) or 'no name'}")
    newest = max(known, key=lambda answer: (answer.epoch, [other.primary for other in known].count(answer.primary)))
    same = [answer for answer in known if answer.primary == newest.primary]
    missed, failing_over = sum(answer.down for answer in same), any(answer.failing_over for answer in same)
    if missed <= len(same) // 2 and not failing_over:
        replicas, down_after_s = (max(answer.replicas for answer in same), max(answer.down_after_s for answer in same))
        return View(newest.primary, replicas=replicas, down_after_s=down_after_s)
    host, port = newest.primary or ("", 0)
    watching = max(answer.sentinels for answer in same)
    if failing_over:
        what = "a failover has begun"
    elif len(answers) <= watching // 2 or len(answers) < newest.quorum:
        what = (
            f"no failover is possible: {len(answers)} of {counted(watching, 'sentinel')} answer, the quorum is "
            f"{newest.quorum}"
        )
    else:
        what = "a failover has not begun yet"
    trouble = f"Sentinel reports the primary {host}:{port} of {name!r} down; {what}"
    return View(newest.primary, trouble, failing_over or missed > asked // 2)


def agreed(answers: Sequence[Answer], asked: int) -> bool:
    """Check whether most sentinels name the same primary, and miss it not: the others need not be waited for."""
    calm = [answer for answer in answers if answer.primary and not answer.down and not answer.failing_over]
    votes = [(answer.primary, answer.epoch) for answer in calm]
    return any(votes.count(vote) > asked // 2 for vote in votes)


def read_answer(
    address: Sequence[bytes], facts: Mapping[bytes, bytes], replicas: Sequence[Mapping[bytes, bytes]]
) -> Answer:
    """Read the replies to GET-MASTER-ADDR-BY-NAME, MASTER and REPLICAS."""
    primary = (text(address[0]), int(address[1]))
    moved = primary != (text(facts[b"ip"]), int(facts[b"port"]))  # the flags are still those of the old primary
    flags = [] if moved else text(facts[b"flags"]).split(",")
    return Answer(
        primary=primary,
        epoch=int(facts[b"config-epoch"]),
        down="s_down" in flags or "o_down" in flags,
        failing_over="failover_in_progress" in flags,
        sentinels=1 + int(facts[b"num-other-sentinels"]),
        quorum=int(facts[b"quorum"]),
        replicas=sum("s_down" not in text(replica[b"flags"]) for replica in replicas),
        down_after_s=int(facts[b"down-after-milliseconds"]) / 1000,
    )
