// What all pages of one run share: title, state, tabs.

import { h, pill, update } from "../dom.js";

const TABS = [["Run", ""], ["Rollouts", "/rollouts"], ["Ledger", "/ledger"], ["Problems", "/problems"], ["Act", "/act"]];

export const runLink = (run, rest = "") => `#/runs/${encodeURIComponent(run)}${rest}`;

// Show the state of a run beside its name: one that stands still is more than running.
export function showState(view, row) {
  update(view.state, pill(row.stands_still ? "stands_still" : row.state));
}

// The view of a page of a run: `parts` are below the tabs, `under` is the last crumb.
export function runView(run, tab, parts, { under, ...others }) {
  const links = TABS.map(([name, rest]) => h("a", { href: runLink(run, rest), "aria-current": name === tab ? "page" : null }, name));
  const state = h("span", { role: "status" });
  const node = h("div", {}, h("div", { class: "title" }, h("h1", {}, under ?? run), state), h("nav", { class: "tabs", "aria-label": "Pages of the run" }, links), ...parts);
  const crumbs = [["runs", "#/"], [run, under ? runLink(run) : null]];
  if (under) crumbs.push([under, null]);
  return { title: under ? `${under} · ${run}` : run, crumbs, node, state, ...others };
}
