"""TransferQueue's side of the store: client, manager and start, registered under the name `Replaybuf`.

TransferQueue's controller is the index: it has, for each field of each sample, the range of the piece with its bytes. A
get reads this range and checks its CRC. So an index that TransferQueue uses again never reads another sample's bytes.
The record of a piece repeats what the controller knows, so that `restore` can give a new controller what the last
checkpoint of the old one lacks.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import BatchMeta, StorageKeyNotFoundError
from transfer_queue.metadata import extract_field_schema
from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
from transfer_queue.storage.clients.base import StorageClientFactory, StorageKVClient
from transfer_queue.storage.managers.base import KVStorageManager, StorageManagerFactory
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

from replaybuf.errors import BrokenFrame, Conflict, Unreadable
from replaybuf.files import CONFIG_BYTES, read_bounded
from replaybuf_transferqueue.records import Field, Names, Record, Restored, reconcile
from replaybuf_transferqueue.settings import BACKEND, read_settings
from replaybuf_transferqueue.store import Piece, Range, Store
from replaybuf_transferqueue.values import decode, encode

logger = logging.getLogger(__name__)

CONTROLLER_TIMEOUT_S = 600.0
"""Longest wait for the controller; it saves and loads its checkpoint meanwhile."""
CHECKPOINT_FILE = "replaybuf.json"
_CONTROLLER_FILE = "controller_state.pkl"


@StorageClientFactory.register("ReplaybufClient")
class ReplaybufClient(StorageKVClient):  # type: ignore[misc]
    """Values of fields in a `Store`. A key is `INDEX@FIELD`, as in TransferQueue's other key-value back ends."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.settings = read_settings(config)
        self.store = Store(self.settings)

    def put(self, keys: list[str], values: list[Any]) -> list[Any]:
        """Store values without a partition; return the range of each."""
        rows: dict[int, dict[str, Any]] = {}
        for key, value in zip(keys, values, strict=True):
            index, field = key.split("@", 1)
            rows.setdefault(int(index), {})[field] = value
        names = self.put_rows("", rows, {}, [None] * len(rows), [{}] * len(rows))
        return [names[int(key.split("@", 1)[0])][key.split("@", 1)[1]] for key in keys]

    def put_rows(
        self,
        partition: str,
        rows: dict[int, dict[str, Any]],
        schema: dict[str, dict[str, Any]],
        keys: Sequence[str | None],
        tags: Sequence[dict[str, Any]],
    ) -> Names:
        """Store fields of samples as one piece each; returns their ranges when they are durable."""
        pieces, names = [], {}
        for (index, fields), key, tag in zip(rows.items(), keys, tags, strict=True):
            piece, payloads, offset = self.store.new_id(), [], 0
            record = Record(partition, index, key, encode(tag, "tag"), {})
            for field, value in fields.items():
                payload = encode(value, field, self.settings.pickle_fields)
                record.fields[field] = Field.describe(offset, payload, value, schema.get(field, {}))
                payloads.append(payload)
                offset += len(payload)
            pieces.append(Piece(piece, index, msgspec.json.encode(record), b"".join(payloads)))
            names[index] = record.names(piece)
        self.store.put(pieces)
        return names

    def get(
        self,
        keys: list[str],
        shapes: Any = None,
        dtypes: Any = None,
        custom_backend_meta: list[Any] | None = None,
    ) -> list[Any]:
        """Read values by their ranges. Raises `StorageKeyNotFoundError` for one that is not there."""
        names = custom_backend_meta or [None] * len(keys)
        absent = [key for key, name in zip(keys, names, strict=True) if name is None]
        if absent:
            raise StorageKeyNotFoundError(f"{len(absent)} of {len(keys)} values were not put: {absent[:5]}")
        payloads = self.store.read([Range(*name[:3]) for name in names])
        return [self._value(key, name, payload) for key, name, payload in zip(keys, names, payloads, strict=True)]

    def clear(self, keys: list[str], custom_backend_meta: Any = None) -> None:
        """Clear the samples of these keys, with all their fields."""
        self.store.clear(sorted({int(key.split("@", 1)[0]) for key in keys}))

    def _value(self, key: str, name: list[Any], payload: memoryview | None) -> Any:
        if payload is None:
            raise StorageKeyNotFoundError(
                f"the value of {key!r} (piece {name[0]}) is not in the store {self.settings.name!r}: its sample was "
                "cleared, or its checkpoint is no longer kept"
            )
        if zlib.crc32(payload) != name[3]:
            raise BrokenFrame(f"the value of {key!r} (piece {name[0]}) does not match its CRC", name=key)
        return decode(payload, key.split("@", 1)[1], self.settings.pickle_fields)


@StorageManagerFactory.register(BACKEND)
class ReplaybufStorageManager(KVStorageManager):  # type: ignore[misc]
    """Puts, gets and clears samples, and saves and loads what a checkpoint needs."""

    storage_client: ReplaybufClient

    def __init__(self, controller_info: Any, config: Any, zmq_context: Any = None) -> None:
        super().__init__(controller_info, {**config, "client_name": "ReplaybufClient"}, zmq_context)

    async def put_data(
        self, data: TensorDict, metadata: BatchMeta, data_parser: Callable[[Any], Any] | None = None
    ) -> None:
        """Store samples durably, then report them to the controller."""
        if data_parser is not None:
            raise NotImplementedError("data_parser works with SimpleStorage only")
        indexes = metadata.global_indexes
        if data.batch_size[0] != len(indexes):
            raise ValueError(f"data has {data.batch_size[0]} samples; its metadata has {len(indexes)}")
        if not indexes:
            return
        partition, fields = metadata.partition_ids[0], sorted(data.keys())
        values = self._generate_values(data)
        rows = {
            index: {field: values[column * len(indexes) + row] for column, field in enumerate(fields)}
            for row, index in enumerate(indexes)
        }
        schema = extract_field_schema(data)
        # The controller alone knows the users' keys, which a restore needs.
        answer = await self.ask("KV_RETRIEVE_KEYS", global_indexes=indexes, partition_id=partition)
        keys = answer["keys"] or [None] * len(indexes)
        tags = [metadata.custom_meta[row] for row in range(len(indexes))]
        names = await asyncio.to_thread(self.storage_client.put_rows, partition, rows, schema, keys, tags)
        for row, index in enumerate(indexes):
            metadata._custom_backend_meta[row].update(names[index])
        await self.notify_data_update(partition, indexes, schema, names)

    async def clear_data(self, metadata: BatchMeta) -> None:
        """Clear samples with all their fields, those that the metadata does not name too."""
        await asyncio.to_thread(self.storage_client.store.clear, metadata.global_indexes)

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Keep every value that the controller's part of the checkpoint names.

        TransferQueue saved that part before this call, and values of it may be gone by now. So it is saved once more,
        while the store keeps everything.
        """
        path = Path(checkpoint_dir, _CONTROLLER_FILE)
        if not path.exists():
            message = f"{path} is not there: this version of TransferQueue saves its checkpoints in another way"
            raise Conflict(message, name="checkpoint_dir", value=checkpoint_dir)
        store, name = self.storage_client.store, uuid.uuid4().hex
        await asyncio.to_thread(store.begin_checkpoint, name)
        await self.ask("SAVE_CONTROLLER_CHECKPOINT", path=str(path))
        written = {"store": self.storage_client.settings.name, "checkpoint": name}
        Path(checkpoint_dir, CHECKPOINT_FILE).write_text(json.dumps(written))
        await asyncio.to_thread(store.finish_checkpoint, name)

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Make the store fit a checkpoint. Raises `Unreadable` if values are missing; `restore` can leave them out."""
        restored = await self.fit(checkpoint_dir)
        store = self.storage_client.store
        await asyncio.to_thread(store.adopt, restored.adopted)
        await asyncio.to_thread(store.retire, restored.unnamed)
        if restored.missing:
            raise Unreadable(
                f"{restored}; replaybuf_transferqueue.restore goes on without these samples", name="missing"
            )
        logger.info("%s", restored)

    async def fit(self, checkpoint_dir: str | None) -> Restored:
        """Load a checkpoint, if any, into the controller, and compare it with the store, which does not change."""
        if checkpoint_dir is not None:
            await asyncio.to_thread(self._check_kept, checkpoint_dir)
            # TransferQueue loads it once more after this call, with the same result.
            await self.ask("LOAD_CONTROLLER_CHECKPOINT", path=str(Path(checkpoint_dir, _CONTROLLER_FILE)))
        listed = await self.ask("GET_LIST_PARTITIONS", "LIST_PARTITIONS_RESPONSE")
        metas: list[BatchMeta] = []
        for partition in listed["partition_ids"]:
            answer = await self.ask("GET_PARTITION_META", partition_id=partition)
            metas += [answer["metadata"]] if answer["metadata"] else []
        keys: dict[int, str | None] = {}
        for meta in metas:
            if meta.size:
                asked = await self.ask(
                    "KV_RETRIEVE_KEYS", global_indexes=meta.global_indexes, partition_id=meta.partition_ids[0]
                )
                keys |= dict(zip(meta.global_indexes, asked["keys"], strict=False))
        return await asyncio.to_thread(reconcile, self.storage_client.store, metas, keys)

    async def ask(self, request: str, response: str | None = None, **body: Any) -> dict[str, Any]:
        """Send a request to the controller; return the body of its answer."""
        message = ZMQMessage.create(
            request_type=ZMQRequestType[request],
            sender_id=self.storage_manager_id,
            receiver_id=self.controller_info.id,
            body=body,
        ).serialize()

        async def exchange() -> ZMQMessage:
            async with self.notify_pool.alease(self.controller_info) as socket:
                try:
                    await socket.send_multipart(message)
                    frames = await asyncio.wait_for(socket.recv_multipart(copy=False), CONTROLLER_TIMEOUT_S)
                except BaseException:
                    # A late answer would be read as that of the next request.
                    socket.close(linger=0)
                    raise
                return ZMQMessage.deserialize(frames)

        answer = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(exchange(), self._notify_loop))
        if answer.request_type != ZMQRequestType[response or f"{request}_RESPONSE"]:
            raise RuntimeError(
                f"the controller answered {request} with {answer.body.get('message', answer.request_type)}"
            )
        return dict(answer.body)

    def close(self) -> None:
        """Close all connections."""
        super().close()
        if hasattr(self, "storage_client"):
            self.storage_client.store.close()

    def _check_kept(self, checkpoint_dir: str) -> None:
        settings, kept = self.storage_client.settings, self.storage_client.store.checkpoints()
        written = json.loads(read_bounded(Path(checkpoint_dir, CHECKPOINT_FILE), CONFIG_BYTES))
        if written["store"] != settings.name:
            raise Conflict(
                f"the checkpoint {checkpoint_dir} is of the store {written['store']!r}; this is {settings.name!r}",
                name="name",
                value=settings.name,
                bound=written["store"],
            )
        if written["checkpoint"] not in kept:
            raise Conflict(
                f"the checkpoint {checkpoint_dir} is not one of the {len(kept)} that the store keeps "
                f"(keep_checkpoints: {settings.keep_checkpoints}), so its values may be deleted; load a newer one",
                name="checkpoint",
                value=written["checkpoint"],
                bound=kept,
            )


@StorageBootstrapProvider.register_provider(BACKEND)  # type: ignore[untyped-decorator]
def start_session(conf: DictConfig) -> dict[str, Any]:
    """Begin a session of the store: processes of older sessions can change nothing any more."""
    store = Store(read_settings(conf.backend[BACKEND]))
    session, pieces = store.open()
    store.close()
    conf.backend[BACKEND].session = session
    if pieces:
        logger.warning(
            "store %r: session %d begins and finds %d pieces of older ones; replaybuf_transferqueue.restore() or "
            "transfer_queue.load_checkpoint() brings their samples back",
            store.settings.name,
            session,
            pieces,
        )
    return {"session": session}
