"""`Client` (blocking) and `AsyncClient`: the calls of a run for producers and trainers.

Their methods are those of `replaybuf.client.calls.RunCalls`, with the same arguments, results and errors, and
`trainer`, which makes the session of a trainer.

Every call raises the error of `replaybuf.errors` that the service answered, `ServiceUnavailable` with address and cause
if the service cannot be reached in time, and `Malformed` if the answer does not fit the contract. With
`retry_for_s` > 0, calls that may be repeated are retried on `ServiceUnavailable` and `NoRoom`, with growing pauses, for
at most that time. On `NotLeader`, where nothing was done, every call is retried.

`url` may name several servers of one Redis, comma-separated. If one does not serve a call, the next one gets it, or the
leader that `NotLeader` names: at once in the first round, then after a pause. The server that served last is tried
first. No other address ever receives anything, in particular not the bearer token. `unix:/PATH` is the unix socket of a
service on this machine.

`compress` requests batch bodies in zstd: that saves network and costs both sides time.
"""

from __future__ import annotations

from typing import Any

from replaybuf.client.async_session import AsyncTrainerSession
from replaybuf.client.http_client import AsyncHttpClient, HttpClient
from replaybuf.client.session import TrainerSession, open_session
from replaybuf.wire.batch import Batch


class Client(HttpClient):
    """Blocking client of one run. Threads may share it.

    - `url`: one address, or several with commas between
    - `timeout_s`: maximum wait for the service, in addition to the `wait_ms` of a call
    - `retry_for_s`: maximum time of retries
    - `compress`: request batch bodies in zstd
    """

    def trainer(self, steps_done: int = 0, **options: Any) -> TrainerSession[Batch]:
        """Make the session of a trainer whose weights have `steps_done` steps; entering it attaches.

        `options`: `keep_checkpoints` of `TrainerSession`, `reader`, which are `ReaderOptions` with the number of ranks,
        and those of `attach`, but `resume_step` and `dp_world_size`.
        """
        return open_session(self, steps_done, **options)


class AsyncClient(AsyncHttpClient):
    """Client of one run for asyncio: the methods of `Client` as coroutines. It belongs to one event loop."""

    def trainer(self, steps_done: int = 0, **options: Any) -> AsyncTrainerSession:
        """Make the session of an asyncio trainer; the arguments are those of `Client.trainer`."""
        return AsyncTrainerSession(self, steps_done, **options)
