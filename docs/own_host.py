"""A hook of mkdocs: a page asks no other host. The theme would ask GitHub for the stars of the repository."""

from __future__ import annotations

from typing import Any

SOURCE = ' data-md-component="source"'
"""The mark of the link to the repository by which the theme's code finds it."""


def on_post_page(output: str, **_: Any) -> str:
    """Leave the link, and take the mark off it."""
    return output.replace(SOURCE, "")
