// Groups of a run by step, state, reward, staleness or source; the address holds the question.

import { get, runPath } from "../api.js";
import { h, pill, table, update } from "../dom.js";
import { clockTime, count, decimal } from "../format.js";
import { runLink, runView } from "./frame.js";

const LIMIT = 50;
const STATES = ["", "live", "in_batches", "retired", "evicted", "dead_lettered"];
const ORDERS = [["", "arrival"], ["reward", "reward"], ["reward_std", "spread of rewards"], ["longest_tokens", "longest rollout"], ["staleness", "staleness"]];
// What people look for first: [name, order, direction].
const TABS = [["Newest", "", "true"], ["Best", "reward", "true"], ["Worst", "reward", "false"], ["Longest", "longest_tokens", "true"], ["Widest spread", "reward_std", "true"]];
const FIELDS = [["step", "Step", "number"], ["min_reward", "Reward from", "number"], ["max_reward", "to", "number"], ["min_staleness", "Staleness from", "number"], ["source", "Source", "text"], ["prompt_id", "Prompt", "text"]];

export function openRollouts({ query }, run) {
  const found = h("div", {});
  const pages = h("div", { class: "buttons" });
  const view = runView(run, "Rollouts", [tabs(query, run), form(query, run), found, pages], { refresh, period_ms: query.get("after") ? 0 : 5000 });

  async function refresh() {
    const asked = Object.fromEntries(query);
    asked.desc ??= "true";
    const page = await get(runPath(run, "/groups"), { ...asked, limit: LIMIT });
    update(found, groupTable(run, page.groups, "No group matches. Clear the filters, or wait for a producer to store one."));
    const next = page.next === null ? null : with_(query, { after: page.next });
    const links = [query.get("after") && h("a", { class: "button", href: address(run, with_(query, { after: "" })) }, "First page"), next && h("a", { class: "button", href: address(run, next) }, "Next page")];
    update(pages, links);
  }

  return view;
}

function tabs(query, run) {
  const [order, desc] = [query.get("order") ?? "", query.get("desc") ?? "true"];
  const link = ([name, by, direction]) => h("a", { class: "button", href: address(run, with_(query, { order: by, desc: direction, after: "" })), "aria-current": order === by && desc === direction ? "true" : null }, name);
  return h("nav", { class: "choice", "aria-label": "Order of the groups" }, TABS.map(link));
}

function form(query, run) {
  const control = (name, label, node) => h("div", {}, h("label", { for: `f-${name}` }, label), node);
  const inputs = FIELDS.map(([name, label, type]) => control(name, label, h("input", { id: `f-${name}`, name, type, step: "any", size: 10, value: query.get(name) ?? "" })));
  const state = h("select", { id: "f-state", name: "state" }, STATES.map((one) => h("option", { value: one, selected: (query.get("state") ?? "") === one }, one.replaceAll("_", " ") || "any")));
  const order = h("select", { id: "f-order", name: "order" }, ORDERS.map(([value, name]) => h("option", { value, selected: (query.get("order") ?? "") === value }, name)));
  const desc = h("select", { id: "f-desc", name: "desc" }, [["true", "highest first"], ["false", "lowest first"]].map(([value, name]) => h("option", { value, selected: (query.get("desc") ?? "true") === value }, name)));
  const submit = (event) => {
    event.preventDefault();
    location.hash = address(run, new URLSearchParams(new FormData(event.target)));
  };
  return h("form", { class: "bar", submit }, control("state", "State", state), inputs, control("order", "Order", order), control("desc", "Direction", desc), h("button", { type: "submit", class: "main" }, "Show"), h("a", { class: "button", href: runLink(run, "/rollouts") }, "Clear"));
}

function with_(query, changes) {
  const changed = new URLSearchParams(query);
  for (const [name, value] of Object.entries(changes)) changed.set(name, value);
  return changed;
}

function address(run, query) {
  const kept = new URLSearchParams([...query].filter(([, value]) => value !== ""));
  return `${runLink(run, "/rollouts")}${kept.size ? `?${kept}` : ""}`;
}

// Groups with their state, scores and the steps that used them.
export function groupTable(run, groups, empty) {
  const columns = [
    ["Group", "name", (one) => h("a", { href: runLink(run, `/groups/${encodeURIComponent(one.group_id)}`) }, one.group_id)],
    ["State", "", (one) => pill(one.reason ?? one.state)],
    ["Prompt", "name", (one) => one.prompt_id],
    ["Version", "number", (one) => count(one.policy_version)],
    ["Reward", "number", (one) => h("span", { class: one.reward_mean > 0 ? "good" : one.reward_mean < 0 ? "bad" : "" }, `${decimal(one.reward_mean)} ± ${decimal(one.reward_std, 2)}`)],
    ["|Advantage|", "number", (one) => decimal(one.advantage_abs_mean)],
    ["Rollouts", "number", (one) => count(one.group_size)],
    ["Tokens", "number", (one) => count(one.tokens)],
    ["Steps", "number", (one) => steps(run, one.batches)],
    ["Stored", "number", (one) => clockTime(one.arrival_s)],
  ];
  return table("Groups", columns, groups, empty);
}

function steps(run, batches) {
  if (!batches.length) return "–";
  const shown = batches.slice(-3).map((step) => [h("a", { href: runLink(run, `/steps/${step}`) }, String(step)), " "]);
  return batches.length > 3 ? ["… ", shown] : shown;
}
