"""The page of a group: its life as one line that grows while the page is open."""

from __future__ import annotations

import re

from tests.conftest import RunClient
from tests.conftest import group as make_group
from tests.console.conftest import OpenPage


def test_the_line_of_a_group_grows_from_its_ticket_to_the_publication(run: RunClient, open_page: OpenPage) -> None:
    """Each moment has its version; turns are shown as the generator recorded them, and hostile ones are not."""
    run.put(batch={"groups_per_batch": 1})
    epoch = run.attach()
    (ticket,) = run.post("tickets", producer="p", count=1).json()["tickets"]
    metadata = {"turns": [2, 3, "<b>4</b>"]}
    run.append(make_group("a", ticket=ticket["ticket"], metadata=metadata))
    page = open_page(str(run.http.base_url), f"/runs/{run.run}/groups/a")
    line = page.get_by_label("Life of the group")
    line.get_by_text("a batch may use it").wait_for()
    assert "2 to 3 turns per rollout" in line.inner_text() and "by version 0" in line.inner_text()
    assert run.batch(0, epoch).status_code == 200
    line.get_by_role("link", name="batch, step 0").wait_for()
    run.ack(0, epoch)
    line.get_by_role("link", name="trained, step 0").wait_for()
    run.publish(1, epoch)
    line.locator("li", has_text=re.compile("^published")).wait_for()
    names = [text.split("\n")[0] for text in line.locator("li").all_inner_texts()]
    assert names == ["ticket", "sampled", "stored", "batch, step 0", "trained, step 0", "published", "kept"]
