"""Figures as scalars in an event file of TensorBoard: `--tensorboard`.

`torch.utils.tensorboard` needs all of TensorBoard. The `SummaryWriter` of tensorboardX writes in a thread that ends at
a full disk, and then blocks its caller. So this module uses tensorboardX's event writer itself.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType
from typing import Any

from replaybuf.errors import Invalid, MissingExtra
from replaybuf_trainer.report.sinks.sink import Figures, flat

EXTRA = "tensorboard"
_NOT_SHOWN = ("time", "step")


class TensorBoard:
    """An event file in a folder. Raises `Invalid` if it cannot be created, `MissingExtra` without tensorboardX."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2
        except ImportError:
            raise MissingExtra("replaybuf train --tensorboard", EXTRA) from None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = EventsWriter(str(folder / "events"))
        except OSError as error:
            raise Invalid(
                f"folder {folder} of --tensorboard cannot be written: {error.strerror or error}",
                name="tensorboard",
                value=str(folder),
            ) from error
        self._events: ModuleType = event_pb2
        self._begun = False

    def write(self, item: Figures) -> None:
        """Write one scalar per figure. Raises `OSError`."""
        if not self._begun:  # TensorBoard then ignores later steps of a process that was killed
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._file.write_event(self._event(item, session_log=start))
            self._begun = True
        event = self._event(item)
        for name, value in flat(item).items():
            if name not in _NOT_SHOWN:
                event.summary.value.add(tag=name, simple_value=value)
        self._file.write_event(event)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _event(self, item: Figures, **fields: Any) -> Any:
        return self._events.Event(wall_time=item.get("time", time.time()), step=item["step"], **fields)
