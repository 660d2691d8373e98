// Runs side by side: what differs between their settings, their newest steps, and one line per run in each chart: of
// held-out sets by version, of what the service measures and of what the trainers measure over steps or hours.

import { find, runPath } from "../api.js";
import { CHARTS, Chart } from "../charts.js";
import { h, pill, table, update } from "../dom.js";
import { FIGURES, describeDifference, describeResult, mean, newestPlaces, stepsOf } from "../figures.js";
import { count, decimal } from "../format.js";
import { evaluationsBySet } from "../learning_charts.js";
import { perStep, REASON_CHARTS } from "../reason_charts.js";
import { runLink } from "./frame.js";

const { uPlot } = window;
// As many as there are colours of lines.
export const MOST_RUNS = 6;
const NEWEST_STEPS = 50;
const POINTS = 600;
const MOST_EVALUATIONS = 1000;
const NONE = "–";

// Title and unit of a chart, and how to read its line from a history.
const COMPARED = [
  ...CHARTS.map(({ title, series, band }) => {
    const [name, read] = series[band ? 2 : 0];
    return [series.length > 1 ? `${title}, ${name}` : title, "", ({ columns }) => read(columns)];
  }),
  ...REASON_CHARTS.map(({ title, part }) => [title, "per step", (history) => perStep(history, part)]),
];

class ComparedChart extends Chart {
  // Each of `lines` is [name of the run, its values of x, its values, place of its colour]; `x` names the axis.
  showLines(lines, x) {
    const [joined, ...values] = uPlot.join(lines.map(([, at, line]) => [at, line]));
    this.spec = { ...this.spec, x, series: lines.map(([name, , , colour], place) => [name, () => values[place], colour]) };
    this.show(joined, null);
  }
}

// Charts that come with their first line, by the name of what they show.
class ChartsByName {
  constructor(what, unit, onRange, alone) {
    this.make = (name) => new ComparedChart({ title: `${what}: ${name}`, unit, alone, series: [] }, onRange, () => null);
    this.charts = new Map();
    this.grid = h("div", { class: "charts" });
  }

  // `linesOf(name)` returns the lines of a chart.
  show(names, linesOf, x) {
    this.grid.hidden = !names.length;
    for (const name of names) {
      if (!this.charts.has(name)) {
        this.charts.set(name, this.make(name));
        this.grid.append(this.charts.get(name).node);
      }
      this.charts.get(name).showLines(linesOf(name), x);
    }
  }
}

export function openCompare({ query, refreshNow }) {
  const names = [...new Set(query.getAll("run"))].slice(0, MOST_RUNS);
  const runs = names.map((name) => ({ name, step: null, range: [null, null] }));
  const [missing, settings, newest] = [h("div", {}), h("div", {}), h("div", {})];
  const charts = COMPARED.map(([title, unit, read]) => new ComparedChart({ title, unit, read, series: [] }, zoom, () => null));
  const axis = h("select", { "aria-label": "Axis", change: showAll }, h("option", { value: "step" }, "over steps"), h("option", { value: "hours" }, "over hours since the first batch"));
  const reset = h("button", { type: "button", hidden: true, click: showAll }, "Whole runs");
  const bar = h("div", { class: "bar" }, axis, reset, h("span", { class: "quiet" }, "Drag over a chart for a range."));
  const heading = h("h2", {}, "Steps");
  const grid = h("div", { class: "charts" }, charts.map((chart) => chart.node));
  const heldOut = new ChartsByName("Held-out", "mean reward, by version", () => null, true);
  const metrics = new ChartsByName("Metric", "reported by the trainers", zoom, false);
  const all = () => [...charts, ...heldOut.charts.values(), ...metrics.charts.values()];

  function zoom(low, high) {
    for (const run of shown()) {
      const { step, steps } = run.history.columns;
      const inside = [...step.keys()].filter((place) => run.x[place] >= low && run.x[place] <= high);
      run.range = inside.length ? [step[inside[0]], step[inside.at(-1)] + steps[inside.at(-1)] - 1] : null;
    }
    readAgain(true);
  }

  function showAll() {
    for (const run of runs) run.range = [null, null];
    readAgain(false);
  }

  function readAgain(bounded) {
    for (const run of runs) run.step = null;
    reset.hidden = !bounded;
    refreshNow();
  }

  const shown = () => runs.filter((run) => run.history?.columns.step.length);

  async function refresh() {
    await Promise.all(runs.map(refreshRun));
    const known = runs.filter((run) => run.status);
    update(missing, runs.filter((run) => !run.status).map(({ name }) => h("p", { class: "bad" }, `There is no run ${name} that you may see.`)));
    update(settings, known.length ? describeSettings(known) : "");
    update(newest, shown().length ? describeNewest(shown()) : "");
    draw();
  }

  async function refreshRun(run) {
    run.status = await find(runPath(run.name));
    if (!run.status || !run.range) run.history = null;
    else if (run.status.step !== run.step) {
      const [from_step, to_step] = run.range;
      run.history = await find(runPath(run.name, "/history"), { from_step, to_step, points: POINTS });
      run.step = run.status.step;
    }
    if (run.status) {
      const answer = await find(runPath(run.name, "/evaluations"), { limit: MOST_EVALUATIONS });
      run.sets = new Map(evaluationsBySet(answer?.evaluations ?? []));
    }
  }

  // A run has run colour in all charts, also in those that other runs are missing from.
  const lineOf = (run, x, values) => [run.name, x, values, runs.indexOf(run)];
  const unionOf = (runs, namesOf) => [...new Set(runs.flatMap((run) => [...namesOf(run)]))];

  function draw() {
    const evaluated = runs.filter((run) => run.status && run.sets.size);
    const resultsOf = (run, name) => run.sets.get(name) ?? [];
    const lines = (name) => evaluated.map((run) => lineOf(run, resultsOf(run, name).map((each) => each.version), resultsOf(run, name).map((each) => each.reward_mean)));
    heldOut.show(unionOf(evaluated, (run) => run.sets.keys()).sort(), lines, "version");
    const drawn = shown();
    for (const part of [heading, bar, grid, metrics.grid]) part.hidden = !drawn.length;
    if (!drawn.length) return;
    for (const run of drawn) {
      const { step, at_s } = run.history.columns;
      run.began_s ??= at_s[0];
      run.x = axis.value === "step" ? step : at_s.map((value) => (value - run.began_s) / 3600);
    }
    for (const chart of charts) chart.showLines(drawn.map((run) => lineOf(run, run.x, chart.spec.read(run.history))), axis.value);
    const column = (run, name) => run.history.metrics[name] ?? run.x.map(() => null);
    const names = unionOf(drawn, (run) => Object.keys(run.history.metrics));
    metrics.show(names, (name) => drawn.map((run) => lineOf(run, run.x, column(run, name))), axis.value);
  }

  const title = "Runs side by side";
  const empty = names.length < 2 && h("p", { class: "empty" }, "Choose two or more in the ", h("a", { href: "#/" }, "list of runs"), ".");
  const node = h("div", {}, h("h1", {}, title), empty, missing, newest, heldOut.grid, settings, heading, bar, grid, metrics.grid);
  const close = () => all().forEach((chart) => chart.close());
  const repaint = () => all().forEach((chart) => chart.repaint());
  return { title, crumbs: [["runs", "#/"], ["side by side", null]], node, refresh, period_ms: 5000, close, repaint };
}

const columnsOf = (first, runs) => [[first, "", (row) => row.name], ...runs.map((run, place) => [h("a", { href: runLink(run.name) }, run.name), "number", (row) => row.values[place]])];

function describeNewest(runs) {
  const places = runs.map(({ history }) => newestPlaces(history.columns, NEWEST_STEPS));
  const value = (column, place) => mean(runs[place].history.columns, column, places[place]);
  const reasons = (part, place) => meanOf(perStep(runs[place].history, part), runs[place].history.columns, places[place]);
  const each = (name, read) => ({ name, values: runs.map((run, place) => read(run, place)) });
  const rows = [
    each("state", ({ status }) => pill(status.state)),
    each("step", ({ status }) => count(status.step)),
    ...heldOutNames(runs).flatMap((name) => [each(`held-out ${name}`, (run) => newestResult(run, name)), ...differenceOf(runs, name)]),
    each("steps in the means below", ({ history }, place) => count(stepsOf(history.columns, places[place]))),
    ...FIGURES.map(([name, column, digits]) => each(name, (_, place) => decimal(value(column, place), digits))),
    each("seconds the trainer waited per step", (_, place) => decimal(reasons("waited", place), 2)),
    each("groups dropped per step", (_, place) => decimal(reasons("dropped", place), 2)),
  ];
  return [h("h2", {}, "Newest steps"), table("Newest steps", columnsOf("Figure", runs), rows, "")];
}

const heldOutNames = (runs) => [...new Set(runs.flatMap(({ sets }) => [...sets.keys()]))].sort();

// The newest result of a run on a held-out set, with its error and version.
function newestResult({ sets }, name) {
  const result = sets.get(name)?.at(-1);
  if (!result) return NONE;
  return describeResult(result);
}

// Of two runs, how far the second is from the first.
function differenceOf(runs, name) {
  const results = runs.map(({ sets }) => sets.get(name)?.at(-1));
  return runs.length === 2 && results.every(Boolean) ? [{ name: `difference on ${name}`, values: [NONE, describeDifference(...results)] }] : [];
}

const meanOf = (values, { steps }, places) => mean({ steps, values }, "values", places);

// Only what differs: two runs share most of their settings.
function describeSettings(runs) {
  const flat = runs.map(({ status }) => flatten(status.config));
  const names = [...new Set(flat.flatMap((run) => [...run.keys()]))].sort();
  const rows = names.map((name) => ({ name, values: flat.map((run) => run.get(name) ?? NONE) })).filter(({ values }) => new Set(values).size > 1);
  return [h("h2", {}, "Settings that differ"), table("Settings that differ", columnsOf("Setting", runs), rows, "The runs have the same settings.")];
}

// Settings by their path, as JSON.
function flatten(value, path = "") {
  const nested = value !== null && typeof value === "object" && !Array.isArray(value);
  if (!nested) return new Map([[path, JSON.stringify(value)]]);
  return new Map(Object.entries(value).flatMap(([name, part]) => [...flatten(part, path ? `${path}.${name}` : name)]));
}
