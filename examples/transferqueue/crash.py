"""Kill TransferQueue in the middle of its work, start it again, and get every acknowledged sample back.

python examples/transferqueue/crash.py --url redis://127.0.0.1:6379
"""

from __future__ import annotations

import argparse
import os
import signal

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf

from replaybuf_transferqueue import BACKEND, restore


def start(url: str, name: str) -> None:
    """Start TransferQueue with its values in the server at `url`."""
    backend = {"storage_backend": BACKEND, BACKEND: {"url": url, "name": name}}
    transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}, "backend": backend}))


def main() -> None:
    """Put samples, kill the controller, restore."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url")
    parser.add_argument("--name", default="example")
    parser.add_argument("--samples", type=int, default=20)
    options = parser.parse_args()
    hook = {"worker_process_setup_hook": "replaybuf_transferqueue.register"}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error", runtime_env=hook)
    start(options.url, options.name)
    for number in range(options.samples):
        fields = {"ids": torch.full((8,), number)}
        transfer_queue.kv_put(f"sample-{number}", "train", fields, tag={"number": number})
    controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    os.kill(ray.get(controller.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    transfer_queue.close()  # forgets the dead controller

    start(options.url, options.name)
    print(restore())
    for key, tag in transfer_queue.kv_list("train")["train"].items():
        (ids,) = transfer_queue.kv_batch_get(keys=[key], partition_id="train")["ids"].unbind()
        if ids.tolist() != [tag["number"]] * 8:
            raise RuntimeError(f"{key} has the bytes of another sample: {ids}")
    transfer_queue.kv_clear(list(transfer_queue.kv_list("train")["train"]), "train")
    transfer_queue.close()
    ray.shutdown()
    print(f"all {options.samples} samples are back")


if __name__ == "__main__":
    main()
