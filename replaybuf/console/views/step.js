// One step: what it trained on, and why this batch.

import { find, get, runPath } from "../api.js";
import { facts, h, pill, table, update } from "../dom.js";
import { clockTime, count, counted, decimal } from "../format.js";
import { runLink, runView } from "./frame.js";

const MOST = 500;
const MOST_RANKS = 64;
const MOST_ROWS = 64;

export function openStep(_, run, step) {
  const [about, why, groups] = [h("div", {}), h("div", {}), h("div", {})];
  const view = runView(run, "Ledger", [about, why, groups], { under: `step ${step}`, refresh, period_ms: 5000 });

  async function refresh() {
    const record = await get(runPath(run, `/batches/${step}/record`));
    const history = await get(runPath(run, "/history"), { from_step: step, to_step: step });
    update(view.state, pill(record.state));
    update(about, describeRecord(record, history.columns));
    update(groups, describeGroups(record, run));
    update(why, describeWhy(await find(runPath(run, `/batches/${step}/explain`))));
  }

  return view;
}

function describeRecord(record, columns) {
  const figure = (name, format) => (columns.step.length ? format(columns[name][0]) : "–");
  return [
    facts([
      ["Trains version", count(record.version)],
      ["Groups", count(record.groups.length)],
      ["Rollouts", count(record.rollouts)],
      ["Tokens", count(record.tokens)],
      ["Padding", record.padding_fraction === null ? "–" : `${decimal(100 * record.padding_fraction, 1)} %`],
      ["Micro-batches per rank", count(record.micro_batches)],
      ["Ranks", count(record.dp_world_size)],
      ["Mean reward", figure("reward_mean", (value) => decimal(value))],
      ["Mean staleness", figure("staleness", (value) => decimal(value, 2))],
      ["Stored to batch", figure("age_s", (value) => `${decimal(value, 1)} s`)],
      ["Assembled", figure("at_s", clockTime)],
      ["Trained", figure("acked_s", clockTime)],
      ["Generation", count(record.generation)],
      ["Strategy", `${record.strategy} ${JSON.stringify(record.options)}`],
      ["Seed", record.seed.join(", ")],
      ["Batch", record.batch_id],
    ]),
    record.short && h("p", { class: "warn" }, `This batch is short (${record.short}): it has ${decimal(100 * (record.fill ?? 0), 0)} % of its budget.`),
  ];
}

const list = (counts) => Object.entries(counts ?? {}).map(([name, number]) => `${count(number)} ${name}`).join(", ") || "none";

const spread = (counts) => Object.entries(counts).map(([value, number]) => `${value}: ${counted(number, "group")}`).join(", ");

function describeWhy(answer) {
  if (!answer) return null;
  const candidates = Object.entries(answer.candidates ?? {}).map(([name, figures]) => [name ? `Candidates of ${name}` : "Candidates", `${count(figures.usable)} usable of ${count(figures.live)} live; left out: ${list(figures.left_out)}`]);
  const before = answer.since_last_batch;
  const pairs = [
    ...candidates,
    before && ["Since the batch before", `${count(before.stored)} stored; dropped: ${list(before.dropped)}; rejected: ${list(before.rejected)}`],
    ["Filters", answer.filters?.map((filter) => filter.name ?? filter).join(", ") || "none"],
    answer.choice && ["Chosen by staleness", spread(answer.choice.staleness)],
    answer.choice && ["Chosen by use (1 = first use)", spread(answer.choice.times_sampled)],
  ].filter(Boolean);
  const unknown = Object.entries(answer.unknown ?? {}).map(([name, cause]) => h("p", { class: "quiet" }, `${name}: ${cause}`));
  return [h("h2", {}, "Why this batch"), facts(pairs), unknown, answer.packing && describePacking(answer.packing)];
}

// One line per rank: its micro-batches, each as full as it is drawn.
function describePacking(packing) {
  const ranks = packing.ranks.slice(0, MOST_RANKS);
  const rows = (rank) => rank.rows.slice(0, MOST_ROWS).map((row) => h("span", { class: "track", title: `${counted(row.rollouts, "rollout")}, ${counted(row.tokens, "token")}` }, h("span", { class: "live", width: `${((100 * row.tokens) / packing.seq_len).toFixed(1)}%` })));
  const lines = ranks.flatMap((rank) => [h("span", {}, `rank ${rank.dp_rank}`), h("span", { class: "packed" }, rows(rank)), h("span", { class: "number" }, `${counted(rank.tokens, "token")}, ${decimal(100 * rank.fill, 0)} % full`)]);
  return [h("h2", {}, `Packing: ${counted(packing.micro_batches, "micro-batch", "micro-batches")} of ${counted(packing.seq_len, "token")} per rank`), h("div", { class: "bars wide" }, lines), packing.ranks.length > ranks.length && h("p", { class: "quiet" }, `${counted(packing.ranks.length - ranks.length, "more rank")} not shown.`)];
}

function describeGroups(record, run) {
  const shown = record.groups.slice(0, MOST);
  const columns = [
    ["Group", "name", (group) => h("a", { href: runLink(run, `/groups/${encodeURIComponent(group.group_id)}`) }, group.group_id)],
    ["Prompt", "name", (group) => group.prompt_id],
    ["Version", "number", (group) => count(group.policy_version)],
    ["Staleness", "number", (group) => count(group.staleness)],
    ["Use", "number", (group) => count(group.times_sampled)],
    ["Tokens", "number", (group) => count(group.tokens)],
  ];
  const worst = h("a", { class: "button", href: runLink(run, `/rollouts?step=${record.step}&order=reward&desc=false`) }, "Worst rewards first");
  const left = record.groups.length - shown.length;
  return [h("h2", {}, "Groups, in the order of the strategy"), h("div", { class: "bar" }, worst), table("Groups of the batch", columns, shown, "The batch has no groups."), left > 0 && h("p", { class: "quiet" }, `${counted(left, "more group")} not shown.`)];
}
