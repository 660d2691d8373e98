"""Authorisation of each call, before it is handled, and the record of what operators and refused callers did."""

from __future__ import annotations

import logging
import time

from starlette.requests import Request

from replaybuf.service.http.body.requests import declared_bytes
from replaybuf.service.http.call.calls import Call
from replaybuf.service.http.guard.auth import ANYONE, Caller, Permission, Tokens

logger = logging.getLogger(__name__)
audit = logging.getLogger("replaybuf.audit")

LOG_EVERY_S = 1.0
"""Refusals within this time are one line: a caller in a loop must not fill the disk."""


class Guard:
    """Lets calls through whose token allows them."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self._logged_at_s = -LOG_EVERY_S
        self._not_logged = 0

    def check(self, request: Request, permission: Permission) -> Caller:
        """Return who makes the call. Raises what `Tokens.check` raises."""
        if self.tokens.open:
            return ANYONE
        authorization, roles, run = permission.authorization, permission.roles, permission.run
        declared = declared_bytes(request)
        return self.tokens.check(authorization, roles, run, declared, lists_runs=permission.lists_runs)

    def recognise(self, request: Request) -> Caller:
        """Return who makes a call that needs no token."""
        return self.tokens.recognise(request.headers.get("authorization"))

    def settle(self, request: Request, call: Call, read_bytes: int, status: int) -> None:
        """Charge what a body had beyond its declared size, and record what an operator changed."""
        if not self.tokens.open and read_bytes > (declared := declared_bytes(request)):
            self.tokens.charge(request.headers.get("authorization"), read_bytes - declared)
        if not call.roles and call.method != "GET":
            path, by = request.scope["path"], request.state.caller.name or "-"
            audit.info("%s %s status=%d by=%s address=%s", call.method, path, status, by, _address(request))

    def log_refusal(self, request: Request, error: Exception) -> None:
        """Log that a call was refused, or the number of these lines that were left out."""
        now_s = time.monotonic()
        if now_s - self._logged_at_s < LOG_EVERY_S:
            self._not_logged += 1
            return
        more = f" (and {self._not_logged} more)" if self._not_logged else ""
        self._logged_at_s, self._not_logged = now_s, 0
        method, path = request.scope["method"], request.scope["path"]
        logger.info("refused %s %s address=%s: %s%s", method, path, _address(request), error, more)


def _address(request: Request) -> str:
    return request.client.host if request.client else "unix socket"
