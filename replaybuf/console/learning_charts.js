// Charts of what a model learns: evaluations on held-out problems by version, rewards, and what the trainer measures.

import { Chart } from "./charts.js";
import { h, update } from "./dom.js";
import { describeDifference, describeResult, mean, newestPlaces, stepsOf } from "./figures.js";
import { counted, decimal } from "./format.js";

const MOST_OPEN = 9;
// Sets that the sentences above the charts name, and steps whose rewards they compare.
const MOST_SETS = 3;
const COMPARED_STEPS = 50;

// The newest result of each version, by the name of the set: [[name, results by version], ...].
export function evaluationsBySet(evaluations) {
  const sets = new Map();
  for (const result of evaluations) {
    const name = result.adapter ? `${result.name}, ${result.adapter}` : result.name;
    if (!sets.has(name)) sets.set(name, new Map());
    sets.get(name).set(result.version, result);
  }
  const inOrder = [...sets].sort(([first], [second]) => (first < second ? -1 : 1));
  return inOrder.map(([name, results]) => [name, [...results.values()].sort((first, second) => first.version - second.version)]);
}

// Whether it learns, in a sentence per held-out set and one about the rewards.
export function describeLearning(sets, columns) {
  const ends = sets.filter(([, results]) => results.length > 1).slice(0, MOST_SETS);
  const heldOut = ends.map(([name, results]) => `Held-out ${name}: ${describeResult(results[0])}, ${describeResult(results.at(-1))} (${describeDifference(results[0], results.at(-1))}).`);
  return [...heldOut, describeRewards(columns)].filter(Boolean).map((line) => h("p", {}, line));
}

function describeRewards(columns) {
  const steps = columns ? Math.min(COMPARED_STEPS, Math.floor(stepsOf(columns, [...columns.steps.keys()]) / 2)) : 0;
  if (steps < 1) return "";
  const newest = newestPlaces(columns, steps);
  const first = newestPlaces({ steps: [...columns.steps].reverse() }, steps).map((place) => columns.steps.length - 1 - place);
  const part = (places) => `${decimal(mean(columns, "reward_mean", places))} in the ${places === newest ? "newest" : "first"} ${counted(stepsOf(columns, places), "step")}`;
  return `Mean reward: ${part(first)}, ${part(newest)}.`;
}

const edge = (sign) => (results) => results.map(({ reward_mean, standard_error }) => (standard_error === null ? null : reward_mean + sign * standard_error));

const heldOut = (name) => ({ title: `Held-out: ${name}`, unit: "mean reward ± standard error, by version", x: "version", alone: true, band: true, series: [["mean + error", edge(1)], ["mean − error", edge(-1)], ["mean", (results) => results.map((result) => result.reward_mean)]] });

const metric = (name) => ({ title: name, unit: "reported by the trainer", series: [["value", ({ metrics }) => metrics[name]]] });

// The charts of the section "Learning": held-out sets and metrics come with their first value. `charts`: those of rewards.
export class LearningCharts {
  constructor(charts, onRange, onPick) {
    this.make = (spec) => new Chart(spec, onRange, onPick);
    this.sets = [];
    this.heldOut = new Map();
    this.metrics = new Map();
    this.rewards = charts;
    this.grid = h("div", { class: "charts" }, charts.map((chart) => chart.node));
    this.others = h("div", { class: "charts" });
    this.summary = h("summary", {});
    this.more = h("details", { class: "more", hidden: true }, this.summary, this.others);
    this.node = h("div", {}, this.grid, this.more);
  }

  get charts() {
    return [...this.heldOut.values(), ...this.rewards, ...this.metrics.values()];
  }

  // An evaluation needs no step: it may come before the first batch.
  showEvaluations(evaluations) {
    this.sets = evaluationsBySet(evaluations);
    for (const [name, results] of this.sets) {
      if (!this.heldOut.has(name)) this.heldOut.set(name, new Chart(heldOut(name), () => null, () => null));
      this.place();
      this.heldOut.get(name).show(results.map((result) => result.version), results);
    }
  }

  showHistory(x, history, how) {
    for (const chart of this.rewards) {
      chart.node.hidden = false; // first: a hidden chart has no width
      chart.show(x, history.columns, how);
    }
    const names = Object.keys(history.metrics); // those that most people look for come first
    const known = this.metrics;
    const inOrder = new Set([...names, ...known.keys()]);
    this.metrics = new Map([...inOrder].map((name) => [name, known.get(name) ?? this.make(metric(name))]));
    this.place(names);
    for (const name of names) this.metrics.get(name).show(x, history, how);
  }

  hideHistory() {
    for (const chart of [...this.rewards, ...this.metrics.values()]) chart.node.hidden = true;
  }

  // Put the charts in their order; a metric without a value in the shown range is hidden.
  place(names = [...this.metrics.keys()]) {
    const shown = new Set(names);
    for (const [name, chart] of this.metrics) chart.node.hidden = !shown.has(name);
    const inOrder = [...this.metrics.values()].map((chart) => chart.node);
    keepOrder(this.grid, [...this.heldOut.values(), ...this.rewards].map((chart) => chart.node).concat(inOrder.slice(0, MOST_OPEN)));
    keepOrder(this.others, inOrder.slice(MOST_OPEN));
    this.more.hidden = inOrder.length <= MOST_OPEN;
    update(this.summary, `${inOrder.length - MOST_OPEN} more metrics`);
  }
}

// Move only what is elsewhere: a moved chart loses its hover.
function keepOrder(parent, nodes) {
  nodes.forEach((node, place) => {
    if (parent.children[place] !== node) parent.insertBefore(node, parent.children[place] ?? null);
  });
}
