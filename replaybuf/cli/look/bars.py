"""Bars of text for terminals, in ASCII where the terminal cannot show blocks."""

from __future__ import annotations

from rich.console import Console

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def draw_bar(share: float, width: int, console: Console) -> str:
    """Return a bar of `width` characters with this share filled; more than nothing shows at least a sliver."""
    share = min(1.0, max(0.0, share))
    if not (console.encoding or "").lower().startswith("utf"):
        return ("#" * max(round(share * width), 1 if share else 0)).ljust(width)
    eighths = max(round(share * width * 8), 1 if share else 0)
    whole, part = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[part] if part else "")).ljust(width)
