// Charts with one line per reason: how long the trainer waited, and which groups were dropped.

import { Chart } from "./charts.js";

const MOST_LINES = 8;
const OTHERS = "others";

// `part` of the history: numbers per row, by reason.
export const REASON_CHARTS = [
  { title: "Waits of the trainer", unit: "seconds per step, by reason", part: "waited", series: [] },
  { title: "Dropped groups", unit: "groups per step, by reason", part: "dropped", series: [] },
];

// A chart whose lines are the reasons of the shown rows; hidden if there is none.
export class ReasonChart extends Chart {
  showHistory(x, history, how) {
    const columns = largest(history[this.spec.part]);
    const names = Object.keys(columns);
    this.node.hidden = !names.length;
    this.spec = { ...this.spec, series: names.map((name) => [name, ({ steps }) => columns[name].map((value, place) => value / steps[place])]) };
    if (names.length) this.show(x, history.columns, how);
    else this.data = null;
  }
}

// The reasons with the largest sums, by sum; those behind `MOST_LINES` are added up.
function largest(byReason) {
  const sorted = Object.entries(byReason).sort((a, b) => sum(b[1]) - sum(a[1]));
  const kept = sorted.slice(0, sorted.length > MOST_LINES ? MOST_LINES - 1 : MOST_LINES);
  const rest = sorted.slice(kept.length).map(([, values]) => values);
  if (rest.length) kept.push([OTHERS, rest[0].map((_, place) => sum(rest.map((values) => values[place])))]);
  return Object.fromEntries(kept);
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

// What all reasons together had per step, in each row.
export function perStep({ columns, ...parts }, part) {
  return columns.steps.map((steps, place) => sum(Object.values(parts[part]).map((values) => values[place])) / steps);
}

// Sums over the rows by reason, and what the newest step has so far.
export function totals(byReason, soFar) {
  const total = { ...soFar };
  for (const [reason, values] of Object.entries(byReason)) total[reason] = (total[reason] ?? 0) + sum(values);
  return total;
}
