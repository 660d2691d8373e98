// One run: why nothing happens, its flow with live numbers, and charts over its steps.

import { find, get, runPath } from "../api.js";
import { CHARTS, Chart, saveCsv } from "../charts.js";
import { diagnose, goneOf, problemsOf } from "../diagnosis.js";
import { h, update } from "../dom.js";
import { age, count, counted, decimal, rate } from "../format.js";
import { REASON_CHARTS, ReasonChart, totals } from "../reason_charts.js";
import { describeChanges } from "./changes.js";
import { runLink, runView, showState } from "./frame.js";

const POINTS = 600;
// The part of the flow that a reason is about.
const PLACES = { producers: "Producers", trainer: "Trainer", operator: "Batches", nothing: "Batches" };

export function openRun(_, run) {
  const [state, flow, buffer, waits, drops, changes] = [h("div", {}), h("ol", { class: "flow" }), h("div", {}), h("div", {}), h("div", {}), h("div", {})];
  const range = { first: null, last: null, time: false, columns: null, history: null };
  const charts = CHARTS.map((spec) => new Chart(spec, zoom, openStep));
  const reasons = REASON_CHARTS.map((spec) => new ReasonChart(spec, zoom, openStep));
  const note = h("span", { class: "quiet" });
  const axis = h("select", { "aria-label": "Axis", change: (event) => draw((range.time = event.target.value === "time")) }, h("option", { value: "step" }, "over steps"), h("option", { value: "time" }, "over time"));
  const reset = h("button", { type: "button", hidden: true, click: () => zoom() }, "Whole run");
  const all = h("button", { type: "button", click: saveAll }, "All as CSV");
  const bar = h("div", { class: "bar" }, axis, reset, all, note);
  const empty = h("p", { class: "empty" }, "No batch yet. Charts begin with the first step.");
  const grid = h("div", { class: "charts" }, [...charts, ...reasons].map((chart) => chart.node));
  const steps = h("div", { hidden: true }, h("h2", {}, "Steps"), bar, empty, changes, grid);
  const view = runView(run, "Run", [state, h("h2", { class: "hidden" }, "Flow"), flow, h("div", { class: "columns" }, buffer, waits, drops), steps], { refresh, period_ms: 2000, close, repaint });
  let drawn = "";

  function zoom(low, high) {
    const bounded = low !== undefined;
    const steps = bounded && range.columns ? stepsBetween(low, high) : [null, null];
    [range.first, range.last] = steps;
    reset.hidden = !bounded;
    drawn = "";
    refreshHistory();
  }

  function openStep(value) {
    const { step, at_s } = range.columns;
    const place = (range.time ? at_s : step).findLastIndex((one) => one <= value);
    location.hash = runLink(run, `/steps/${step[Math.max(0, place)]}`);
  }

  function stepsBetween(low, high) {
    const { step, steps, at_s } = range.columns;
    const inside = step.filter((_, place) => (range.time ? at_s : step)[place] >= low && (range.time ? at_s : step)[place] <= high);
    if (!inside.length) return [range.first, range.last];
    const last = step.lastIndexOf(inside.at(-1));
    return [inside[0], inside.at(-1) + steps[last] - 1];
  }

  async function refresh() {
    const answer = await get(runPath(run, "/flow"));
    showState(view, answer.row);
    update(state, describeState(answer.row, run, await findIdle(answer.row, run)));
    update(flow, describeFlow(answer, run));
    update(buffer, h("h2", {}, "Buffer, by version of the oldest token"), versions(answer.versions));
    const now = `${answer.row.step} ${answer.batch_s === null} ${range.first} ${range.last} ${answer.ledger_entries}`;
    if (now !== drawn) await refreshHistory(now);
    const soFar = range.first === null ? answer : { step_waited_s: {}, step_dropped: {} };
    update(waits, describeWaits(totals(range.history.waited, soFar.step_waited_s)));
    update(drops, describeDrops(totals(range.history.dropped, soFar.step_dropped)));
  }

  async function refreshHistory(now = "") {
    const history = await get(runPath(run, "/history"), { from_step: range.first, to_step: range.last, points: POINTS });
    [drawn, range.columns, range.history] = [now, history.columns, history];
    steps.hidden = false; // first: a hidden chart has no width
    draw();
    update(changes, describeChanges(history, run));
    const { step, steps: sizes } = history.columns;
    const merged = sizes.some((each) => each > 1) ? `, up to ${Math.max(...sizes)} steps per point` : "";
    const last = step.at(-1) + sizes.at(-1) - 1;
    note.textContent = sizes.length ? `${step[0] === last ? `step ${last}` : `steps ${step[0]} to ${last}`}${merged}. Drag over a chart for a range, click for a step.` : "";
  }

  function draw() {
    const some = Boolean(range.columns?.step.length);
    [empty.hidden, grid.hidden, bar.hidden] = [some, !some, !some];
    if (!some) return;
    const x = range.time ? range.columns.at_s : range.columns.step;
    const marks = range.history.changes.map((change) => (range.time ? change.at_s : change.step));
    for (const chart of charts) chart.show(x, range.columns, range.time, marks);
    for (const chart of reasons) chart.showHistory(x, range.history, range.time, marks);
  }

  function saveAll() {
    if (!range.columns) return;
    const parts = ["waited", "dropped"].flatMap((part) => Object.entries(range.history[part]).map(([reason, values]) => [`${part} ${reason}`, values]));
    const named = [...Object.entries(range.columns), ...parts];
    saveCsv(`${run}.csv`, named.map(([name]) => name), named.map(([, values]) => values));
  }

  function repaint() {
    [...charts, ...reasons].forEach((chart) => chart.repaint());
  }

  function close() {
    [...charts, ...reasons].forEach((chart) => chart.close());
  }

  return view;
}

// Producers without an engine are a cause that only their heartbeats tell.
async function findIdle(row, run) {
  if (!row.producers_without_engine || !row.stands_still) return [];
  const known = await find(runPath(run, "/producers"));
  return (known?.producers ?? []).filter((one) => !one.gone && (one.engines === 0 || one.held_back_by));
}

function describeState(row, run, idle) {
  const { kind, what, details, todo, page } = diagnose(row);
  const engines = idle.slice(0, 5).map((one) => `${one.name}: ${one.engines === 0 ? "no engine takes its requests" : `held back by ${one.held_back_by}`}`);
  const problems = problemsOf(row);
  return h(
    "div",
    { class: `state ${kind}` },
    h("strong", {}, what),
    h("p", {}, details.join(" · ")),
    engines.map((line) => h("p", { class: "bad" }, line)),
    row.waiting?.detail && h("p", {}, row.waiting.detail),
    h("p", { class: "quiet" }, todo, page && " ", page && h("a", { href: runLink(run, page) }, page === "/act" ? "Act" : "Problems")),
    problems > 0 && page !== "/problems" && h("p", {}, h("a", { class: "bad", href: runLink(run, "/problems") }, `${counted(problems, "problem")} ${problems === 1 ? "needs" : "need"} a look`)),
  );
}

function describeFlow(flow, run) {
  const { row } = flow;
  const { kind, place } = diagnose(row);
  const waits = row.waiting && row.state !== "finished";
  const here = place ?? (waits ? PLACES[row.waiting.blocked_on] : "");
  const card = (name, big, ...lines) =>
    h("li", { class: name === here ? `here ${kind}` : null }, h("h3", {}, name), h("div", { class: "big" }, big), lines.map((line) => h("div", {}, line)), name === here && h("div", { class: "mark" }, "the run waits here"));
  return [
    card("Producers", count(row.producers_known), row.producers_last_seen_s === null ? "never seen" : `seen ${age(row.producers_last_seen_s)} ago`, goneOf(row) ? h("a", { class: "bad", href: runLink(run, "/problems") }, `${goneOf(row)} gone`) : rate(row.groups_per_s, "groups/s")),
    card("Tickets", `${count(flow.tickets_out)} out`, flow.group_s ? `${age(flow.group_s)} from ticket to group` : "no group came by ticket yet"),
    card("Buffer", counted(row.groups_live, "group"), counted(row.tokens_live, "token"), flow.stored_s === null ? "no group yet" : `newest ${age(flow.stored_s)} ago`),
    card("Batches", `step ${count(row.step)}`, flow.batch_s === null ? "no batch yet" : `newest batch ${age(flow.batch_s)} ago`, row.rewards.length ? `mean reward ${decimal(row.rewards.at(-1))}` : "", row.max_steps ? `${counted(row.max_steps, "step")} in all` : "", row.step > 0 && [h("a", { href: runLink(run, `/steps/${row.step - 1}`) }, `step ${count(row.step - 1)}`), ", ", h("a", { href: runLink(run, `/rollouts?step=${row.step - 1}&order=reward&desc=false`) }, "its worst rewards")]),
    card("Trainer", row.trainer_last_seen_s === null ? "none" : rate(row.tokens_per_s, "tok/s"), row.trainer_last_seen_s === null ? "no trainer has attached" : `seen ${age(row.trainer_last_seen_s)} ago`, flow.step_s ? `${age(flow.step_s)} work per step` : ""),
    card("Published version", count(row.published_version), row.staleness === null ? "" : `mean staleness ${decimal(row.staleness, 2)}`),
  ];
}

function versions(counted) {
  if (!counted.length) return h("p", { class: "quiet" }, "The buffer is empty.");
  const most = Math.max(...counted.map((one) => one.live + one.in_batches));
  const share = (value) => `${((100 * value) / most).toFixed(1)}%`;
  const bars = counted.flatMap((one) => [
    h("span", {}, one.version === null ? "older" : `v${one.version}`),
    h("span", { class: "track" }, h("span", { class: "live", width: share(one.live) }), h("span", { class: "used", width: share(one.in_batches) })),
    h("span", { class: "number" }, count(one.live + one.in_batches)),
  ]);
  return [h("div", { class: "bars" }, bars), h("div", { class: "legend" }, h("span", { class: "live" }, "live"), h("span", { class: "used" }, "in batches"))];
}

function describeWaits(waited_s) {
  return sums("Waits of the trainer in the shown steps", waited_s, age, "The trainer never waited for a batch.");
}

function describeDrops(dropped) {
  return sums("Groups dropped in the shown steps", dropped, count, "No group was dropped.");
}

function sums(title, values, format, none) {
  const pairs = Object.entries(values).sort((a, b) => b[1] - a[1]);
  const most = Math.max(...pairs.map(([, value]) => value), 1e-9);
  const bars = pairs.flatMap(([name, value]) => [
    h("span", {}, name),
    h("span", { class: "track" }, h("span", { class: "live", width: `${((100 * value) / most).toFixed(1)}%` })),
    h("span", { class: "number" }, format(value)),
  ]);
  return [h("h2", {}, title), pairs.length ? h("div", { class: "bars" }, bars) : h("p", { class: "quiet" }, none)];
}
