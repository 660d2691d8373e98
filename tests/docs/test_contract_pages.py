"""The pages of http/, observe.md and metrics.md name every call, field, reason, problem type and metric of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from replaybuf.errors import ReplaybufError
from replaybuf.plugins.entry_points import STRATEGIES, names
from replaybuf.service.http.call.calls import CALLS
from replaybuf.service.http.call.reference_pages import HTTP_GROUPS, http_index, metrics_page, run_page
from replaybuf.wire.answer.run_status import Buckets, Coverage, DropAges, Histograms, RunStatus
from replaybuf.wire.config import BatchSpec, Limits, RunConfig, TicketSpec
from replaybuf.wire.drop_reasons import DeadLetterReason, EvictionReason, RejectionReason
from replaybuf.wire.group import GroupJson, RolloutJson
from replaybuf.wire.ledger import AnyRecord
from replaybuf.wire.plan import Plan, PlannedGroup
from replaybuf.wire.wait_reasons import REASONS, WAIT_REASONS
from tests.conftest import RunClient, group

ROOT = Path(__file__).parents[2]
METRICS_PAGE = (ROOT / "docs" / "metrics.md").read_text()
NEEDS_PLUGIN = "replaybuf_admission_seconds"
"""It has samples once a run has an admission plug-in; tests/service/test_admissions.py reads them."""
OBSERVE = (ROOT / "docs" / "observe.md").read_text()
HTTP_PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs" / "http").glob("*.md"))}
HTTP = "\n".join(HTTP_PAGES.values())


def rows(text: str, heading: str) -> dict[str, str]:
    """Read the tables of one section: first cell, without code marks, to the rest of the row."""
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| `([\w{},]+)` (\|.*)\|$", section, re.MULTILINE)
    return dict(cells)


def test_every_waiting_reason_is_explained_with_who_has_to_act() -> None:
    """The rows are in the order in which the service checks the reasons."""
    explained = rows(OBSERVE, "Why there is no batch")
    assert tuple(explained) == REASONS
    for reason, row in explained.items():
        assert WAIT_REASONS[reason].blocked_on in row.split("|")[1]


def test_every_metric_is_described_with_its_labels_and_kind(run: RunClient, tmp_path: Path) -> None:
    """The table has exactly the metrics of a service with a run with and a run without adapters."""
    limits, spill = {"max_tokens_live": 1000}, {"url": f"file://{tmp_path}"}
    run.put(batch={"groups_per_batch": 1}, tickets={"max_failed_share": 0.2}, limits=limits, spill=spill)
    run.append(group("used"), group("dropped", tokens=9), group("rejected", version=9))
    epoch = run.attach(seq_len=8)
    assert run.batch(0, epoch).status_code == run.ack(0, epoch).status_code == 200
    assert run.get("cursors/reader").status_code == 200
    tenants = RunClient(str(run.http.base_url), f"{run.run}-tenants")
    tenants.put(batch={}, adapters={"a": {"groups_per_batch": 1}})
    tenants.append(group("used", adapter="a"), group("dropped", tokens=9, adapter="a"))
    assert tenants.batch(0, tenants.attach(seq_len=8)).status_code == 200
    result = {"name": "held-out", "version": 0, "versions": [0], "reward_mean": 0.5, "standard_error": 0.1}
    result |= {"rollouts": 4, "adapter": "a"}
    run.http.post(f"{tenants.path}/evaluations", json=result).raise_for_status()
    tenants.http.close()
    described = dict(re.findall(r"^\| `([\w{},]+)` (\|.*)\|$", METRICS_PAGE, re.MULTILINE))
    families = {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(run.http.get("/metrics").text)
        if not family.name.startswith("process_")
    }
    assert {name.partition("{")[0] for name in described} == set(families)
    for name, row in described.items():
        family = families[name.partition("{")[0]]
        assert row.split("|")[1].strip().startswith(family.type)
        labels = {label for sample in family.samples for label in sample.labels} - {"run", "le"}
        if family.name == NEEDS_PLUGIN:
            continue
        assert family.samples
        assert labels == set(re.findall(r"\w+", name.partition("{")[2]))


def test_metrics_and_fields_of_the_configuration_are_those_of_the_code() -> None:
    """`make docs` writes them."""
    assert metrics_page() == METRICS_PAGE
    assert run_page(HTTP_PAGES["runs"]) == HTTP_PAGES["runs"]


def test_the_index_lists_every_call_with_its_roles_and_its_section() -> None:
    """`make docs` writes its tables."""
    groups = {name: HTTP_PAGES[name] for name in HTTP_GROUPS}
    assert http_index(HTTP_PAGES["index"], groups) == HTTP_PAGES["index"]


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("## `GET /v1/runs`\n", "## Listing\n", "GET /v1/runs$"),
        ("## `GET /v1/runs`\n", "## `GET /v1/run`\n", "GET /v1/run:"),
    ],
    ids=["no section", "a section of an unknown call"],
)
def test_the_index_is_not_written_while_pages_and_calls_differ(before: str, after: str, named: str) -> None:
    """`make docs` fails and names the call."""
    groups = {name: HTTP_PAGES[name].replace(before, after) for name in HTTP_GROUPS}
    with pytest.raises(ValueError, match=named):
        http_index(HTTP_PAGES["index"], groups)


def test_every_query_parameter_and_field_of_a_body_is_documented() -> None:
    """Each field name occurs on the page."""
    words = set(re.findall(r"\w+", HTTP))
    shapes: set[type[msgspec.Struct]] = {call.body for call in CALLS if call.body} | {
        BatchSpec,
        Limits,
        RunConfig,
        TicketSpec,
        GroupJson,
        RolloutJson,
        RunStatus,
        Histograms,
        Buckets,
        DropAges,
        Coverage,
        Plan,
        PlannedGroup,
    }
    fields = {field.encode_name for shape in shapes for field in msgspec.structs.fields(shape)}
    assert fields | {parameter.name for call in CALLS for parameter in call.query or ()} <= words


def test_every_problem_type_and_reason_of_rejection_is_documented() -> None:
    """Errors that never cross HTTP are exempt."""
    code = "".join(
        path.read_text()
        for folder in ("wire", "service", "kernel")
        for path in (ROOT / "replaybuf" / folder).rglob("*.py")
    )
    used = set(re.findall(r"\b(?:GroupRejected|_rejected|Rejection)\(\s*\"(\w+)\"", code))
    listed = re.findall(r"^\| (`.*?) \|", HTTP.partition("| rejected as |")[2].partition("\n\n")[0], re.MULTILINE)
    assert re.findall(r"`(\w+)`", "".join(listed)) == list(get_args(RejectionReason))
    assert used <= {*get_args(RejectionReason)}

    def slugs(cls: type[ReplaybufError]) -> set[str]:
        return {cls.slug}.union(*(slugs(child) for child in cls.__subclasses__()))

    local = {
        "missing-extra",
        "group-rejected",
        "generation-fault",
        "engine-fault",
        "engine-away",
        "batch-overdue",
        "engine-unfit",
        "group-aborted",
        "prompt-fault",
        "reward-fault",
    }
    assert {slug for slug in slugs(ReplaybufError) - local if f"`{slug}`" not in HTTP_PAGES["errors"]} == set()


def test_every_strategy_ledger_type_and_reason_of_a_drop_is_named() -> None:
    """Both pages list the reasons of dead letters."""
    strategy = re.findall(r"^- Strategies:(.*)$", HTTP, re.MULTILINE)[0]
    assert {name for name in names(STRATEGIES) if f"`{name}`" not in strategy} == set()
    tags = {record.__struct_config__.tag for record in get_args(AnyRecord)}
    types = re.findall(r"Types:\s`([A-Z_ ]+)`", HTTP)[0].split()
    assert set(types) == tags and len(types) == len(tags)
    explained = re.findall(r"^\| dead letter \|(.*)$", OBSERVE, re.MULTILINE)[0]
    assert re.findall(r"`(\w+)`", explained) == list(get_args(DeadLetterReason))
    evicted = re.findall(r"^\| evicted \|(.*)$", OBSERVE, re.MULTILINE)[0]
    assert re.findall(r"`(\w+)`: ", evicted) == list(get_args(EvictionReason))
    listed = HTTP_PAGES["browse"].rpartition("Reasons:")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == {*get_args(DeadLetterReason)}
