"""`/`: one page that shows every run of this server, without anything fetched from elsewhere."""

from __future__ import annotations

from importlib.resources import files

PAGE = files("replaybuf.service").joinpath("console.html").read_text()
