// One run: whether the model learns, why nothing happens, its flow with live numbers, and charts over its steps.

import { callText, find, get, runPath } from "../api.js";
import { CHARTS, Chart, saveCsv, saveFile } from "../charts.js";
import { diagnose, goneOf, problemsOf } from "../diagnosis.js";
import { h, table, update } from "../dom.js";
import { age, count, counted, decimal, rate } from "../format.js";
import { LearningCharts, describeLearning } from "../learning_charts.js";
import { REASON_CHARTS, ReasonChart, totals } from "../reason_charts.js";
import { describeChanges } from "./changes.js";
import { runLink, runView, showState } from "./frame.js";

const POINTS = 600;
const MOST_EVALUATIONS = 1000;
// An evaluation leaves no record of the ledger, so nothing else tells that there is a new one.
const EVALUATIONS_MS = 10000;
// The part of the flow that a reason is about.
const PLACES = { producers: "Producers", trainer: "Trainer", operator: "Batches", nothing: "Batches" };

export function openRun(_, run) {
  const [state, flow, buffer, waits, drops, changes, prompts] = [h("div", {}), h("ol", { class: "flow" }), ...Array.from({ length: 5 }, () => h("div", {}))];
  const range = { first: null, last: null, columns: null, history: null };
  const chartsOf = (section) => CHARTS.filter((spec) => spec.section === section).map((spec) => new Chart(spec, zoom, openStep));
  const [speed, data] = [chartsOf("Speed"), chartsOf("Data")];
  const learning = new LearningCharts(chartsOf("Learning"), zoom, openStep);
  const reasons = REASON_CHARTS.map((spec) => new ReasonChart(spec, zoom, openStep));
  const note = h("span", { class: "quiet" });
  const choose = (label, ...options) => h("select", { "aria-label": label, change: draw }, options.map(([value, text]) => h("option", { value }, text)));
  const axis = choose("Axis", ["step", "over steps"], ["time", "over time"]);
  const smooth = choose("Smoothing", ["1", "not smoothed"], ["10", "smoothed over 10"], ["50", "smoothed over 50"]);
  const scale = choose("Scale", ["linear", "linear"], ["log", "logarithmic"]);
  const reset = h("button", { type: "button", hidden: true, click: () => zoom() }, "Whole run");
  const all = h("button", { type: "button", click: saveAll }, "All as CSV");
  const report = h("button", { type: "button", title: "One HTML file to keep or to send", click: saveReport }, "Report");
  const bar = h("div", { class: "bar" }, axis, smooth, scale, reset, all, report, note);
  const empty = h("p", { class: "empty" }, "No batch yet. Charts begin with the first step.");
  const [learned, said] = [h("div", {}), h("p", {})];
  const grid = (charts) => h("div", { class: "charts" }, charts.map((chart) => chart.node));
  const overSteps = [section("Speed", grid(speed)), section("Data", prompts, grid(data))];
  const parts = [state, section("Learning", learned, said, bar, empty, learning.node, changes), section("Flow", flow, h("div", { class: "columns" }, buffer, waits, drops), grid(reasons)), overSteps];
  const view = runView(run, "Run", parts.flat(), { refresh, period_ms: 2000, close, repaint });
  const charts = () => [...learning.charts, ...speed, ...data, ...reasons];
  let [drawn, evaluatedAt] = ["", -EVALUATIONS_MS];

  function zoom(low, high) {
    const bounded = low !== undefined;
    const steps = bounded && range.columns ? stepsBetween(low, high) : [null, null];
    [range.first, range.last] = steps;
    reset.hidden = !bounded;
    drawn = "";
    refreshHistory();
  }

  function openStep(value) {
    const { step } = range.columns;
    location.hash = runLink(run, `/steps/${step[Math.max(0, places().findLastIndex((place) => place <= value))]}`);
  }

  // Values of x, one per row.
  const places = () => (axis.value === "time" ? range.columns.at_s : range.columns.step);

  function stepsBetween(low, high) {
    const { step, steps } = range.columns;
    const inside = step.filter((_, place) => places()[place] >= low && places()[place] <= high);
    if (!inside.length) return [range.first, range.last];
    const last = step.lastIndexOf(inside.at(-1));
    return [inside[0], inside.at(-1) + steps[last] - 1];
  }

  async function refresh() {
    const answer = await get(runPath(run, "/flow"));
    showState(view, answer.row);
    update(state, describeState(answer.row, run, await findIdle(answer.row, run)));
    update(flow, describeFlow(answer, run));
    update(said, linksToRollouts(answer.row, run));
    update(prompts, describePrompts(answer));
    update(buffer, h("h2", {}, "Buffer, by version of the oldest token"), versions(answer.versions));
    const now = `${answer.row.step} ${answer.batch_s === null} ${range.first} ${range.last} ${answer.ledger_entries}`;
    if (now !== drawn) await refreshHistory(now);
    await refreshEvaluations();
    update(learned, describeLearning(learning.sets, range.columns));
    const soFar = range.first === null ? answer : { step_waited_s: {}, step_dropped: {} };
    update(waits, describeWaits(totals(range.history.waited, soFar.step_waited_s)));
    update(drops, describeDrops(totals(range.history.dropped, soFar.step_dropped)));
  }

  async function refreshHistory(now = "") {
    const history = await get(runPath(run, "/history"), { from_step: range.first, to_step: range.last, points: POINTS });
    [drawn, range.columns, range.history] = [now, history.columns, history];
    draw();
    update(changes, describeChanges(history, run));
    const { step, steps: sizes } = history.columns;
    const merged = sizes.some((each) => each > 1) ? `, up to ${Math.max(...sizes)} steps per point` : "";
    const last = step.at(-1) + sizes.at(-1) - 1;
    note.textContent = sizes.length ? `${step[0] === last ? `step ${last}` : `steps ${step[0]} to ${last}`}${merged}. Drag over a chart for a range, click for a step.` : "";
  }

  async function refreshEvaluations() {
    if (performance.now() - evaluatedAt < EVALUATIONS_MS) return;
    evaluatedAt = performance.now();
    const answer = await find(runPath(run, "/evaluations"), { limit: MOST_EVALUATIONS });
    learning.showEvaluations(answer?.evaluations ?? []);
  }

  function draw() {
    const some = Boolean(range.columns?.step.length);
    [empty.hidden, bar.hidden] = [some, !some];
    for (const part of overSteps) part.hidden = !some;
    for (const chart of reasons) chart.node.hidden = true; // until it has a line
    if (!some) return learning.hideHistory();
    const time = axis.value === "time";
    const marks = range.history.changes.map((change) => (time ? change.at_s : change.step));
    const how = { time, marks, smooth: Number(smooth.value), log: scale.value === "log" };
    learning.showHistory(places(), range.history, how);
    for (const chart of [...speed, ...data]) chart.show(places(), range.columns, how);
    for (const chart of reasons) chart.showHistory(places(), range.history, how);
  }

  function saveAll() {
    if (!range.columns) return;
    const parts = ["waited", "dropped", "metrics"].flatMap((part) => Object.entries(range.history[part]).map(([name, values]) => [`${part} ${name}`, values]));
    const named = [...Object.entries(range.columns), ...parts];
    saveCsv(`${run}.csv`, named.map(([name]) => name), named.map(([, values]) => values));
  }

  async function saveReport() {
    try {
      saveFile(`${run}.html`, "text/html", await callText("GET", runPath(run, "/report")));
    } catch (error) {
      note.textContent = `The report could not be read: ${error.message}`;
    }
  }

  function repaint() {
    charts().forEach((chart) => chart.repaint());
  }

  function close() {
    charts().forEach((chart) => chart.close());
  }

  return view;
}

function section(title, ...parts) {
  return h("details", { class: "section", open: true }, h("summary", {}, h("h2", {}, title)), ...parts);
}

// Producers without an engine are a cause that only their heartbeats tell.
async function findIdle(row, run) {
  if (!row.producers_without_engine || !row.stands_still) return [];
  const known = await find(runPath(run, "/producers"));
  return (known?.producers ?? []).filter((producer) => !producer.gone && (producer.engines === 0 || producer.held_back_by));
}

function describeState(row, run, idle) {
  const { kind, what, details, todo, page } = diagnose(row);
  const engines = idle.slice(0, 5).map((producer) => `${producer.name}: ${producer.engines === 0 ? "no engine takes its requests" : `held back by ${producer.held_back_by}`}`);
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

// What people ask behind the curves.
function linksToRollouts({ step }, run) {
  if (step < 1) return "";
  return [h("a", { href: runLink(run, "/rollouts?list=ends") }, "What it said at first and now"), " · ", h("a", { href: worstOf(run, step - 1) }, "Its worst completions of the last step")];
}

const worstOf = (run, step) => runLink(run, `/rollouts?step=${step}&order=reward&desc=false`);

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
    card("Batches", `step ${count(row.step)}`, flow.batch_s === null ? "no batch yet" : `newest batch ${age(flow.batch_s)} ago`, row.rewards.length ? `mean reward ${decimal(row.rewards.at(-1))}` : "", row.max_steps ? `${counted(row.max_steps, "step")} in all` : "", row.step > 0 && [h("a", { href: runLink(run, `/steps/${row.step - 1}`) }, `step ${count(row.step - 1)}`), ", ", h("a", { href: worstOf(run, row.step - 1) }, "its worst rewards")]),
    card("Trainer", row.trainer_last_seen_s === null ? "none" : rate(row.tokens_per_s, "tok/s"), row.trainer_last_seen_s === null ? "no trainer has attached" : `seen ${age(row.trainer_last_seen_s)} ago`, flow.step_s ? `${age(flow.step_s)} work per step` : ""),
    card("Published version", count(row.published_version), row.staleness === null ? "" : `mean staleness ${decimal(row.staleness, 2)}`),
  ];
}

function versions(counted) {
  if (!counted.length) return h("p", { class: "quiet" }, "The buffer is empty.");
  const most = Math.max(...counted.map((version) => version.live + version.in_batches));
  const share = (value) => `${((100 * value) / most).toFixed(1)}%`;
  const bars = counted.flatMap((version) => [
    h("span", {}, version.version === null ? "older" : `v${version.version}`),
    h("span", { class: "track" }, h("span", { class: "live", width: share(version.live) }), h("span", { class: "used", width: share(version.in_batches) })),
    h("span", { class: "number" }, count(version.live + version.in_batches)),
  ]);
  return [h("div", { class: "bars" }, bars), h("div", { class: "legend" }, h("span", { class: "live" }, "live"), h("span", { class: "used" }, "in batches"))];
}

function describeWaits(waited_s) {
  return sums("Waits of the trainer in the shown steps", waited_s, age, "The trainer never waited for a batch.");
}

const percent = (share) => `${decimal(100 * share, 0)} %`;

// What became of the prompts, by source, and whether long ones get lost; see "What is counted" in the documentation.
function describePrompts({ coverage, reuse }) {
  const { lengths, sources } = coverage;
  const columns = [
    ["Source", "name", ([name]) => (name === "*" ? "others" : name)],
    ["Stored", "number", ([, source]) => count(source.stored)],
    ["Trained", "number", ([, source]) => count(source.trained)],
    ["Dropped", "number", ([, source]) => count(source.dropped)],
    ["Trained share", "number", ([, source]) => percent(source.share)],
  ];
  const longer = lengths?.used > lengths?.stored;
  const rows = Object.entries(sources).sort(([, a], [, b]) => a.share - b.share);
  const uses = reuse.uses_per_group && h("p", { class: "quiet" }, `A trained group was used ${decimal(reuse.uses_per_group, 2)} times. Producers stored ${decimal(reuse.generated_share, 2)} groups per use.`);
  return [
    coverage.issued > 0 && h("p", { class: "quiet" }, `${percent(coverage.share)} of the prompts that ended were trained: ${count(coverage.trained)} trained, ${count(coverage.dropped)} dropped, ${count(coverage.failed)} failed.`),
    uses,
    lengths?.biased && h("p", { class: "warn" }, `${longer ? "Short" : "Long"} rollouts get lost: trained groups have ${count(Math.round(lengths.used))} tokens per rollout, stored ones ${count(Math.round(lengths.stored))}. Groups that are dropped are the cause: allow more staleness, or reissue their prompts (on_stale).`),
    rows.length > 0 && table("Prompts by source", columns, rows, ""),
  ];
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
