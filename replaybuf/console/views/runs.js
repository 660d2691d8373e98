// All runs of the server, one row each.

import { get } from "../api.js";
import { diagnose, goneOf } from "../diagnosis.js";
import { h, pill, sparkline, update, updateInTurns } from "../dom.js";
import { age, count, counted, decimal, explainReason, rate } from "../format.js";
import { MOST_RUNS } from "./compare.js";
import { runLink } from "./frame.js";

const SHOWN = 200;
const order = { by: "state", down: false };
const picked = new Set();
const filter = { text: "", state: "", all: false };

// In the order of what needs a person.
const STATES = ["stands_still", "paused", "running", "finished"];
const stateOf = (row) => (row.stands_still ? "stands_still" : row.state);

// Heading, class, value to sort by, cell.
const COLUMNS = [
  ["Run", "", (row) => row.run, name],
  ["State", "", (row) => STATES.indexOf(stateOf(row)), (row) => pill(stateOf(row))],
  ["Waits for", "why", (row) => row.waiting?.reason ?? "", why],
  ["Step", "number", (row) => row.step, (row) => (row.max_steps ? `${count(row.step)} / ${count(row.max_steps)}` : count(row.step))],
  ["Version", "number minor extra", (row) => row.published_version, (row) => count(row.published_version)],
  ["Tokens/s", "number", (row) => row.tokens_per_s, (row) => count(row.tokens_per_s)],
  ["Reward", "reward", (row) => row.rewards.at(-1) ?? -Infinity, reward],
  ["Staleness", "number extra", (row) => row.staleness ?? -1, (row) => decimal(row.staleness, 1)],
  ["Buffer", "number extra", (row) => row.groups_live, (row) => count(row.groups_live)],
  ["Trainer seen", "number", (row) => row.trainer_last_seen_s ?? Infinity, (row) => age(row.trainer_last_seen_s)],
  ["Producers seen", "number", (row) => row.producers_last_seen_s ?? Infinity, producers],
];

// Shown where several servers share the runs.
const LEADER = ["Led by", "", (row) => row.leader ?? "", (row) => row.leader?.replace(/^https?:\/\//, "") ?? "nobody yet"];

function name(row) {
  const pick = h("input", { type: "checkbox", "aria-label": `Compare ${row.run}`, "data-pick": row.run, checked: picked.has(row.run) });
  return [pick, h("a", { href: runLink(row.run) }, row.run)];
}

function reward(row) {
  const newest = row.rewards.at(-1);
  if (newest === undefined) return "–";
  return [sparkline(row.rewards, `mean reward of the last ${counted(row.rewards.length, "step")}`), h("span", {}, decimal(newest))];
}

function producers(row) {
  const gone = goneOf(row) ? h("span", { class: "bad" }, ` ${goneOf(row)} gone`) : "";
  return [age(row.producers_last_seen_s), gone];
}

function why(row) {
  if (row.paused_reason && row.paused_reason !== "operator") return h("span", { class: "bad" }, row.paused_reason);
  const since = row.waiting_s === null ? "" : ` for ${age(row.waiting_s)}`;
  const diagnosis = diagnose(row);
  if (row.stands_still) return [h("span", { class: "bad" }, diagnosis.what), h("span", { class: "quiet" }, ` ${row.waiting?.reason ?? "ready"}${since}`)];
  if (!row.waiting) return h("span", { class: "good" }, "ready");
  const { reason, blocked_on: who } = row.waiting;
  const words = STATES.includes(reason) ? "" : `${explainReason(reason)[0]} `; // the column before has the state
  return [words, h("span", { class: "quiet" }, `${reason}${since}${who === "nothing" ? "" : ` · ${who}`}`)];
}

function heading([name, kind]) {
  const sorted = order.by === name.toLowerCase();
  const arrow = sorted ? (order.down ? " ↓" : " ↑") : "";
  const label = h("button", { type: "button", "data-sort": name.toLowerCase() }, name + arrow);
  return h("th", { scope: "col", class: kind, "aria-sort": sorted ? (order.down ? "descending" : "ascending") : "none" }, label);
}

function select(rows) {
  const text = filter.text.toLowerCase();
  const value = ([...COLUMNS, LEADER].find(([name]) => name.toLowerCase() === order.by) ?? COLUMNS[0])[2];
  const kept = rows.filter((row) => (!filter.state || stateOf(row) === filter.state) && `${row.run} ${row.strategy} ${row.waiting?.reason ?? ""}`.toLowerCase().includes(text));
  const sign = order.down ? -1 : 1;
  return kept.sort((a, b) => sign * (value(a) > value(b) ? 1 : value(a) < value(b) ? -1 : 0) || (a.run > b.run ? 1 : -1));
}

// Few runs that are all in the list need no choice.
function describePicked(rows) {
  const names = picked.size ? [...picked] : rows.map((row) => row.run);
  if (names.length < 2 || names.length > MOST_RUNS) return names.length && picked.size ? h("span", { class: "quiet" }, `choose 2 to ${MOST_RUNS} runs to compare`) : "";
  const query = new URLSearchParams(names.map((run) => ["run", run]));
  return h("a", { class: "button", href: `#/compare?${query}` }, picked.size ? `Compare ${names.length} runs` : `Compare these ${names.length} runs`);
}

export function openRuns({ refreshNow }) {
  let overview = null;
  const [broken, head, lines] = [h("div", {}), h("tr", {}), h("tbody", {})];
  const table = h("table", { class: "runs" }, h("caption", { class: "hidden" }, "Runs"), h("thead", {}, head), lines);
  const body = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" });
  // A screen reader reads a status after each change: the speed, which always changes, is not part of it.
  const summary = h("span", { role: "status" }, "Loading");
  const speed = h("span", {});
  const more = h("p", {});
  const compare = h("span", {});
  const search = h("input", { type: "search", placeholder: "Name, strategy or reason", "aria-label": "Search runs", value: filter.text });
  const states = ["", ...STATES].map((state) => h("option", { value: state, selected: state === filter.state }, state.replaceAll("_", " ") || "any state"));
  const state = h("select", { "aria-label": "State" }, states);
  search.addEventListener("input", () => paint((filter.text = search.value)));
  state.addEventListener("change", () => paint((filter.state = state.value)));
  body.addEventListener("click", (event) => {
    const by = event.target.closest("[data-sort]")?.dataset.sort;
    if (!by) return;
    order.down = order.by === by ? !order.down : false;
    order.by = by;
    paint();
  });
  body.addEventListener("change", ({ target }) => {
    if (target.checked) picked.add(target.dataset.pick);
    else picked.delete(target.dataset.pick);
    paint();
  });
  more.addEventListener("click", (event) => event.target.closest("button") && paint((filter.all = true)));

  function paint() {
    if (!overview) return;
    const rows = select([...overview.runs]);
    const shown = filter.all ? rows : rows.slice(0, SHOWN);
    const unreadable = Object.entries(overview.unreadable).map(([name, cause]) => h("p", { class: "bad" }, `Run ${name} cannot be read: ${cause}`));
    const nothing = overview.runs.length
      ? h("p", { class: "empty" }, "No run matches. Clear the search or choose any state.")
      : h("p", { class: "empty" }, "No run yet. Create one here, or start ", h("code", {}, "replaybuf demo"), " to see a whole run.");
    update(broken, unreadable);
    update(body, rows.length ? table : nothing);
    const columns = new Set(overview.runs.map((row) => row.leader).filter(Boolean)).size > 1 ? [...COLUMNS, LEADER] : COLUMNS;
    update(head, columns.map(heading));
    updateInTurns(lines, shown.map((row) => () => h("tr", {}, columns.map(([label, kind, , cell]) => h("td", { class: kind, "data-label": label }, cell(row))))));
    const left = rows.length - shown.length;
    update(compare, describePicked(rows));
    update(more, left ? h("button", { type: "button" }, `Show ${left} more`) : "");
    update(speed, ` · ${rate(overview.runs.reduce((sum, row) => sum + row.tokens_per_s, 0), "tokens/s")} trained`);
    const still = overview.runs.filter((row) => row.stands_still).length;
    update(summary, `${count(rows.length)} of ${counted(overview.runs.length, "run")}`, still > 0 && h("span", { class: "bad" }, ` · ${count(still)} ${still === 1 ? "stands" : "stand"} still`));
    update(document.getElementById("server"), `${overview.version} · ${overview.durability}`);
  }

  async function refresh() {
    overview = await get("/v1/overview");
    paint();
  }

  const bar = h("div", { class: "bar" }, search, state, h("span", { class: "grow" }), compare, h("a", { class: "button", href: "#/new" }, "Create a run"));
  const node = h("div", {}, h("h1", {}, "Runs"), h("p", { class: "quiet" }, summary, speed), bar, broken, body, more);
  return { title: "Runs", crumbs: [], node, refresh, period_ms: 2000, refreshNow };
}
