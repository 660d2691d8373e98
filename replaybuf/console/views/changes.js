// What a change did: each change of a run, with means over the steps before and after it.

import { h } from "../dom.js";
import { FIGURES, mean, stepsOf } from "../figures.js";
import { clockTime, count, counted, decimal } from "../format.js";
import { runLink } from "./frame.js";

const MOST_CHANGES = 8;
const MOST_STEPS = 50;

export function describeChanges(history, run) {
  const { changes } = history;
  const shown = changes.slice(-MOST_CHANGES).reverse();
  if (!shown.length) return null;
  const items = shown.map((change, back) => describeChange(history, changes, changes.length - 1 - back, run));
  const left = changes.length - shown.length;
  return [h("h2", {}, "Changes, newest first"), h("ol", { class: "changes" }, items), left > 0 && h("p", { class: "quiet" }, `${counted(left, "older change")} in the `, h("a", { href: runLink(run, "/ledger") }, "ledger"), ".")];
}

function describeChange(history, changes, place, run) {
  const change = changes[place];
  const first = Math.max(change.step - MOST_STEPS, ...changes.slice(0, place).filter((other) => other.step < change.step).map((other) => other.step));
  const end = Math.min(change.step + MOST_STEPS, ...changes.slice(place + 1).filter((other) => other.step > change.step).map((other) => other.step));
  const [before, after] = [between(history.columns, first, change.step), between(history.columns, change.step, end)];
  const compared = before.length && after.length;
  const rows = FIGURES.map(([name, column, digits]) => [name, mean(history.columns, column, before), mean(history.columns, column, after), digits]).filter(([, old, now]) => old !== null && now !== null);
  const table = compared && h("table", {}, h("thead", {}, h("tr", {}, ["mean of", `${steps(history.columns, before)} before`, `${steps(history.columns, after)} after`].map((name, at) => h("th", { scope: "col", class: at ? "number" : "" }, name)))), h("tbody", {}, rows.map(([name, old, now, digits]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "number" }, decimal(old, digits)), h("td", { class: "number" }, decimal(now, digits))))));
  const none = !compared && h("p", { class: "quiet" }, before.length ? "No step was trained since." : "The shown steps all come after the change.");
  return h("li", {}, h("p", {}, h("a", { href: runLink(run, `/ledger?before=${change.entry}`) }, `step ${count(change.step)}`), ` · ${clockTime(change.at_s)}${change.by ? ` · by ${change.by}` : ""}`), change.lines.map((line) => h("p", {}, h("strong", {}, line))), table || none);
}

// Places of rows that lie between two steps.
function between({ step, steps: sizes }, first, end) {
  return step.map((_, place) => place).filter((place) => step[place] >= first && step[place] + sizes[place] <= end);
}

const steps = (columns, places) => counted(stepsOf(columns, places), "step");
