"""Report of a run as one HTML file that needs no network: what it learned, how fast, and what it waited for.

=========  =============================================
`page`     the page of a run, from answers of the service
`charts`   line charts as SVG, also for other pictures
=========  =============================================
"""

from __future__ import annotations

from replaybuf.report.page import POINTS, Introduction, bullets, render, table

__all__ = ["POINTS", "Introduction", "bullets", "render", "table"]
