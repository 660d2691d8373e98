"""A Valkey for each test, one Ray for all, and TransferQueue on this back end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import transfer_queue
from starting_queue import start_queue_on
from starting_ray import start_ray

from replaybuf_transferqueue.settings import Settings
from replaybuf_transferqueue.store import Store
from tests.valkeys import Valkey


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the kill tests run longer than a usual run does, and at other moments."""
    parser.addoption("--kills", type=int, default=1, help="how often the kill test kills everything")
    parser.addoption("--seed", type=int, default=7, help="seed of the moments at which the kill test kills")


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Valkey]:
    with Valkey(tmp_path / "valkey") as server:
        yield server


@pytest.fixture
def open_store(valkey: Valkey) -> Iterator[Callable[..., Store]]:
    """Open a store and begin a session, or join one."""
    stores: list[Store] = []

    def open_one(session: int = 0, **settings: Any) -> Store:
        store = Store(Settings(**{"url": valkey.url, "timeout_s": 20.0, "session": session} | settings))
        stores.append(store)
        if not session:
            store.open()
        return store

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    start_ray(2)
    yield
    ray.shutdown()


@pytest.fixture
def start_queue(ray_cluster: None, valkey: Valkey) -> Iterator[Callable[..., Any]]:
    """Start TransferQueue on this back end; a second start ends the first one, as a crash of its controller does."""
    yield lambda **settings: start_queue_on(valkey, settings)
    transfer_queue.close()
