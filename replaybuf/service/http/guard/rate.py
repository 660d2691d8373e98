"""Rate limits of one token: calls and bytes fill by the second, up to what two seconds bring."""

from __future__ import annotations

from replaybuf.errors import RateLimited
from replaybuf.service.http.guard.token_file import StoredToken

BURST_S = 2.0


class TokenRate:
    """What a token may still spend. A body larger than two seconds' worth passes when all is left, and is paid off."""

    def __init__(self, token: StoredToken, now_s: float) -> None:
        self.token = token
        self._buckets = [
            _Bucket(name, per_s)
            for name, per_s in (("max_calls_per_s", token.max_calls_per_s), ("max_bytes_per_s", token.max_bytes_per_s))
        ]
        self._at_s = now_s

    def take(self, calls: int, nbytes: int, now_s: float) -> None:
        """Spend calls and bytes. Raises `RateLimited`, with the time until they may be spent."""
        passed_s, self._at_s = max(0.0, now_s - self._at_s), now_s
        for bucket, amount in zip(self._buckets, (calls, nbytes), strict=True):
            bucket.fill(passed_s)
            bucket.check(amount, self.token.name)
        self.spend(calls, nbytes)

    def spend(self, calls: int, nbytes: int) -> None:
        """Spend calls and bytes, also more than is left."""
        for bucket, amount in zip(self._buckets, (calls, nbytes), strict=True):
            bucket.left -= amount


class _Bucket:
    def __init__(self, name: str, per_s: float | None) -> None:
        self._name, self._per_s = name, per_s or float("inf")
        self._full = max(1.0, self._per_s * BURST_S)
        self.left = self._full

    def fill(self, passed_s: float) -> None:
        if self._full < float("inf"):
            self.left = min(self._full, self.left + passed_s * self._per_s)

    def check(self, amount: int, who: str) -> None:
        missing = min(amount, self._full) - self.left
        if amount and missing > 0:
            raise RateLimited(
                f"token {who!r} has {self._name} {self._per_s:g}; wait {missing / self._per_s:.1f} s, or ask the "
                "operator for a token with another limit",
                name=self._name,
                value=amount,
                bound=self._per_s,
                retry_after_s=missing / self._per_s,
            )
