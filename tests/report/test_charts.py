"""Line charts as SVG: whatever the values are, the picture is whole."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from replaybuf.report.charts import HEIGHT, WIDTH, Chart, Line, draw

VALUES = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def charts(make: st.DrawFn) -> Chart:
    """Charts with at least one value, of up to four lines and 20 points."""
    points = make(st.integers(1, 20))
    columns = st.lists(VALUES, min_size=points, max_size=points)
    name = make(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=8))
    places = st.lists(st.floats(-1e9, 1e9), min_size=points, max_size=points)
    lines = []
    for _ in range(make(st.integers(1, 3))):
        low, high = make(st.tuples(columns, columns) | st.just(([], [])))
        lines.append(Line(name, make(columns), low, high, make(places | st.just([]))))
    known = Line(name, [make(st.floats(-1e9, 1e9))] * points)
    return Chart(name, "unit", "step", list(range(points)), [known, *lines])


@given(charts())
def test_every_point_lies_inside_the_picture(chart: Chart) -> None:
    """Names are text, and values as large as floats are leave no `nan` or `inf`."""
    picture = ElementTree.fromstring(draw(chart))
    for part in picture.iter():
        for x, y in re.findall(r"([^ ,]+),([^ ,]+)", part.get("points", "")):
            assert 0 <= float(x) <= WIDTH and 0 <= float(y) <= HEIGHT
        if part.tag == "circle":
            assert 0 <= float(part.get("cx", "")) <= WIDTH and 0 <= float(part.get("cy", "")) <= HEIGHT


def test_large_numbers_are_written_in_full() -> None:
    """The last of 100,000 steps is not 1e+05."""
    picture = draw(Chart("Loss", "", "step", [0, 99_873], [Line("loss", [2.0, 0.00012345])]))
    assert re.findall(r"<text[^>]*>([^<]*)<", picture) == ["2", "0.0001234", "step 0", "99,873"]


def test_a_line_breaks_at_a_missing_value_and_a_lone_value_is_a_point() -> None:
    lines = [Line("loss", [1.0, 2.0, None, 3.0, None, 4.0, 5.0])]
    picture = ElementTree.fromstring(draw(Chart("Loss", "", "step", range(7), lines)))
    assert [part.tag for part in picture if "line0" in part.get("class", "")] == ["polyline", "circle", "polyline"]
    assert picture.get("aria-label") == "Loss by step. Newest: loss 5."
