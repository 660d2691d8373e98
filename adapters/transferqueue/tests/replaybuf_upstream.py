"""A pytest plugin that runs TransferQueue's own tests on this back end: `-p replaybuf_upstream`."""

from __future__ import annotations

import os
from typing import Any

import pytest
from omegaconf import OmegaConf
from starting_ray import start_ray

import replaybuf_transferqueue

CONFIG = {
    "controller": {"polling_mode": True},
    "backend": {
        "storage_backend": replaybuf_transferqueue.BACKEND,
        replaybuf_transferqueue.BACKEND: {"url": os.environ.get("UPSTREAM_URL")},
    },
}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Give the modules this back end, and its registration to all workers of Ray."""
    os.environ["TQ_TEST_BACKEND"] = replaybuf_transferqueue.BACKEND
    items: list[Any] = list(session.items)
    for module in {item.module for item in items}:
        if hasattr(module, "BACKEND_CONFIGS"):
            module.BACKEND_CONFIGS[replaybuf_transferqueue.BACKEND] = CONFIG
        elif hasattr(module, "_TQ_CONFIG"):
            module._TQ_CONFIG = OmegaConf.create(CONFIG)
    start_ray(4)
