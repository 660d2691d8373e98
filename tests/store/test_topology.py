"""Redis URLs of Sentinel, and what the answers of sentinels mean."""

from __future__ import annotations

import dataclasses

import pytest

from replaybuf.errors import Invalid
from replaybuf.store.redis.cluster import Cluster
from replaybuf.store.redis.sentinel_answers import Answer, View, agreed, combine
from replaybuf.store.redis.server import find_split
from replaybuf.store.redis.topology import SentinelUrl, is_redis_url, parse_topology

OLD, NEW = ("10.0.0.1", 6379), ("10.0.0.2", 6379)


def answer(primary: tuple[str, int] = OLD, epoch: int = 3, *, down: bool = False, failing_over: bool = False) -> Answer:
    """Return what one of three sentinels with quorum 2 says."""
    return Answer(primary, epoch, down, failing_over, sentinels=3, quorum=2)


def test_a_url_has_several_sentinels_a_name_and_options_of_both_sides() -> None:
    url = SentinelUrl.parse(
        "rediss+sentinel://user:a%2Fb@one:7000,[::1]:7001,two/policy/3?ssl_ca_certs=/ca&sentinel_password=c"
    )
    assert url.hosts == (("one", 7000), ("::1", 7001), ("two", 26379))
    assert url.name == "policy"
    servers = {"username": "user", "password": "a/b", "db": 3, "ssl_ca_certs": "/ca", "ssl": True}
    assert url.server_options == servers
    assert url.sentinel_options == {"password": "c", "ssl_ca_certs": "/ca", "ssl": True}


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://:SECRET@one:7000",
        "redis+sentinel://:SECRET@one:7000/",
        "redis+sentinel://user:SECRET@one:port/policy",
        "redis+sentinel://user:SE/CRET@one:7000/policy",
        "redis+sentinel://one:7000,,two/policy?sentinel_password=SECRET",
        "redis+sentinel://:SECRET@one/policy/first",
        "redis+cluster://:SECRET@one:7000,two:7000/name",
    ],
)
def test_a_malformed_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse_topology(url)
    assert "CRET" not in repr((refused.value.detail, refused.value.value))


def test_the_url_of_a_cluster_has_several_nodes_and_is_meant_as_a_redis() -> None:
    """`backup --to` must not write a file of this name."""
    assert is_redis_url("redis+cluster://one:7000")
    assert isinstance(parse_topology("rediss+cluster://user:a%2Fb@one:7000,[::1]:7001,two?ssl_ca_certs=/ca"), Cluster)


@pytest.mark.parametrize("text", ["run.backup", "/data/redis", "redis/run.backup"])
def test_the_path_of_a_file_is_not_meant_as_a_redis(text: str) -> None:
    assert not is_redis_url(text)


def test_the_newest_configuration_counts_and_not_the_majority() -> None:
    """Two sentinels have not heard of the failover that the third led."""
    assert combine([answer(OLD, 3), answer(NEW, 4), answer(OLD, 3)], 3, "policy").primary == NEW


def test_one_sentinel_that_misses_the_primary_changes_nothing() -> None:
    assert combine([answer(), answer(down=True), answer()], 3, "policy") == View(OLD)


def test_a_failover_that_has_begun_ends_the_use_of_the_old_primary() -> None:
    """It answers again, but a replica is promoted all the same: what it confirms from now on would be lost."""
    view = combine([answer(), answer(failing_over=True), answer()], 3, "policy")
    assert view.down and "a failover has begun" in str(view.trouble)
    assert combine([answer(), answer(failing_over=True), answer(NEW, 4)], 3, "policy") == View(NEW)
    assert not agreed([answer(failing_over=True), answer()], 3)


def test_a_minority_that_misses_the_primary_explains_an_outage_and_makes_none() -> None:
    """The other sentinels are away: nobody can replace a primary that may well answer us."""
    view = combine([answer(down=True)], 3, "policy")
    assert (view.primary, view.down) == (OLD, False)
    assert "no failover is possible" in str(view.trouble)
    assert combine([answer(down=True)] * 2, 3, "policy").down


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([answer(down=True), answer(down=True, failing_over=True)], "a failover has begun"),
        ([answer(down=True), answer(down=True), answer(down=True)], "a failover has not begun yet"),
        ([Answer(None, names=("other",))], "does not know the name 'policy'; it knows other"),
        ([Answer(None, refusal="ERR unknown command")], "refuse to answer: ERR unknown command"),
        ([], "none of 3 sentinels answers"),
    ],
)
def test_the_reason_of_an_outage_is_named(answers: list[Answer], words: str) -> None:
    assert words in str(combine(answers, 3, "policy").trouble)


def test_too_few_sentinels_for_a_failover_are_named() -> None:
    """The URL names one of three sentinels, and the others are dead: it misses them."""
    lonely = Answer(OLD, 3, down=True, sentinels=3, quorum=2)
    assert "no failover is possible: 1 of 3 sentinels answer, the quorum is 2" in str(combine([lonely], 1, "n").trouble)


def test_the_others_are_not_waited_for_once_most_agree() -> None:
    assert agreed([answer(), answer()], 3)
    assert not agreed([answer()], 3)
    assert not agreed([answer(OLD, 3), answer(NEW, 4)], 3)
    assert not agreed([answer(down=True), answer(down=True)], 3), "the third may know the new primary"


@pytest.mark.parametrize(
    ("offsets", "up_s", "former", "usable"),
    [
        ((9, 0), 1, "0" * 40, False),  # one has not loaded the new history yet
        ((9,), 10, "0" * 40, False),
        ((9, 9), 1, "0" * 40, True),
        ((9,), 12, "0" * 40, True),  # the other one is not promoted any more
        ((), 1, "ab" * 20, True),  # it was promoted, so all replicas share its history
    ],
)
def test_a_restarted_primary_waits_for_the_replicas_of_its_old_history(
    offsets: tuple[int, ...], up_s: int, former: str, usable: bool
) -> None:
    """Sentinel would promote the one with the higher offset, which is that of the old history."""
    replicas = [
        f"slave{number}:ip=127.0.0.1,port=1,state=online,offset={offset},lag=0,type=replica"
        for number, offset in enumerate(offsets)
    ]
    facts = [f"uptime_in_seconds:{up_s}", "# Replication", "role:master", *replicas, f"master_replid2:{former}"]
    view = combine([dataclasses.replace(answer(OLD), replicas=2, down_after_s=1.0) for _ in range(2)], 3, "n")
    why = find_split("\r\n".join(facts), replicas=view.replicas, down_after_s=view.down_after_s)
    assert (why is None) == usable, why
