"""Log messages: one event per line, as text or as JSON, with the id of the request that caused it."""

from __future__ import annotations

import logging
import re
import sys
import time
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias

import msgspec

LogFormat: TypeAlias = Literal["text", "json"]

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that this task answers; "" outside of requests."""

_FIELD = re.compile(r"(\w+)=%[-+0-9.]*[a-z]|%[-+0-9.]*[a-z]")
_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_CHATTY = ("httpx", "httpcore", "uvicorn.error", "asyncio")


def configure_logging(level: str, form: LogFormat) -> None:
    """Log to standard error from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in _CHATTY:
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))


def announce(message: str, *values: object) -> None:
    """Print an event on standard output in the form of the log messages, such as the address of a server."""
    print(_write("replaybuf", logging.INFO, message, values), flush=True)


def announce_failure(program: str, detail: str) -> None:
    """Print on standard error why a program ends, in the form of the log messages."""
    text = detail if _is_json() else f"{program}: {detail}"
    print(_write(program, logging.ERROR, "%s", (text,)), file=sys.stderr, flush=True)


def _is_json() -> bool:
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def _write(logger: str, level: int, message: str, values: tuple[object, ...]) -> str:
    record = logging.LogRecord(logger, level, "", 0, message, values, None)
    return JsonLines().format(record) if _is_json() else record.getMessage()


class TextLines(logging.Formatter):
    """Text with `request=ID` at the end. A message is one line; only a traceback has more."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the name of the base class
        """Return the line without a traceback."""
        line = super().formatMessage(record).replace("\n", "\\n").replace("\r", "\\r")
        return f"{line} request={request}" if (request := request_id.get()) else line


class JsonLines(logging.Formatter):
    """JSON: `time` (Unix), `level`, `logger`, `message`, `request`, `traceback`; `name=value` parts are fields too."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        line = _fields(record) | {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := request_id.get():
            line["request"] = request
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the values whose place in the message has a name, such as `run=%s`."""
    if not isinstance(record.args, tuple):
        return {}
    names = [match.group(1) for match in _FIELD.finditer(str(record.msg).replace("%%", ""))]
    return {name: value for name, value in zip(names, record.args, strict=False) if name}


class RequestIds:
    """Ids of requests: unique in this process, and over its restarts."""

    def __init__(self) -> None:
        self._begin = f"{time.time_ns() // 1_000_000:x}"
        self._number = 0

    def new(self) -> str:
        """Return the next id."""
        self._number += 1
        return f"{self._begin}-{self._number:x}"
