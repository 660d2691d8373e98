"""A hook of mkdocs: each decision is one line with its number and title, and opens to its text.

A list of Markdown would count on, so that numbers differ from those that other texts cite where one is free.
"""

from __future__ import annotations

import re
from typing import Any

PAGE = "decisions.md"
ENTRY = re.compile(r"^(\d+)\. ((?:.*\n)(?:(?:[ ].*)?\n)*)", re.MULTILINE)
TITLE = re.compile(r"\*\*(.+?)[.:,]?\*\*", re.DOTALL)


def fold(entry: re.Match[str]) -> str:
    """Write an entry as an element that opens; the anchor is inside, so that a link to it opens it."""
    number, text = entry[1], re.sub(r"^ {1,5}", "", entry[2], flags=re.MULTILINE)
    title = TITLE.search(text)
    if title is None:
        raise ValueError(f"decision {number} in {PAGE} has no title: write it as **Title.**")
    summary = f'<summary markdown="span">{number}. {" ".join(title[1].split())}</summary>'
    opening = f'<details class="decision" markdown="1">\n{summary}\n<a id="{number}"></a>\n\n'
    return f"{opening}{text.rstrip()}\n\n</details>\n\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fold the entries of the decisions; other pages stay as they are."""
    return ENTRY.sub(fold, markdown) if page.file.src_uri == PAGE else markdown
