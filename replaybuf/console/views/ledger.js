// The ledger as a timeline, newest first.

import { get, runPath } from "../api.js";
import { h, update } from "../dom.js";
import { clockTime, count, counted, shorten } from "../format.js";
import { runLink, runView } from "./frame.js";

const LIMIT = 100;
const MOST_PAGES = 20;
const TYPES = ["", "BATCH", "ACK", "POLICY", "CHECKPOINT", "CONFIG", "ATTACH", "REWIND", "EVICT", "DEAD_LETTER", "PURGE", "TICKET", "COLUMNS", "TRIM", "LOSS"];

export function openLedger({ query }, run) {
  const before = query.get("before") ? Number(query.get("before")) : null;
  const list = h("div", {});
  const pages = h("div", { class: "buttons" });
  let records = [];
  let kind = "";
  const choice = h("select", { id: "kind", change: (event) => paint((kind = event.target.value)) }, TYPES.map((type) => h("option", { value: type }, type.toLowerCase().replaceAll("_", " ") || "all records")));
  const bar = h("div", { class: "bar" }, h("div", {}, h("label", { for: "kind" }, "Records"), choice));
  const view = runView(run, "Ledger", [bar, list, pages], { refresh, period_ms: before === null ? 3000 : 0 });

  async function refresh() {
    const newest = before ?? (await get(runPath(run, "/flow"))).ledger_entries;
    const after = Math.max(0, newest - LIMIT);
    const known = records[0]?.entry ?? 0;
    if (known >= newest) return;
    const added = await read(Math.max(after, known), newest);
    records = [...added.reverse(), ...records].filter((record) => record.entry > after);
    paint();
    const older = after > 0 && h("a", { class: "button", href: runLink(run, `/ledger?before=${after}`) }, "Older records");
    update(pages, before !== null && h("a", { class: "button", href: runLink(run, "/ledger") }, "Newest records"), older);
  }

  // Records behind `after` up to `newest`; a page of large batches ends early.
  async function read(after, newest) {
    const records = [];
    for (let page = 0; page < MOST_PAGES; page++) {
      const { records: more, next } = await get(runPath(run, "/ledger"), { after: records.at(-1)?.entry ?? after, limit: LIMIT });
      records.push(...more.filter((record) => record.entry <= newest));
      if (next === null || next >= newest) break;
    }
    return records;
  }

  function paint() {
    const shown = records.filter((record) => !kind || record.type === kind);
    const lines = shown.map((record) => h("li", {}, h("time", {}, clockTime(record.at_s)), h("strong", {}, record.type.toLowerCase().replaceAll("_", " ")), h("span", { class: "what" }, describe(record, run))));
    update(list, shown.length ? h("ol", { class: "timeline" }, lines) : h("p", { class: "empty" }, "No record of this kind is on this page. Older ones may be trimmed."));
  }

  return view;
}

const sizes = (numbers) => Object.entries(numbers).map(([reason, list]) => `${count(list.length)} ${reason}`).join(", ");
const who = (record) => (record.by ? ` by ${record.by}` : "");

const TEXTS = {
  BATCH: (r, run) => [h("a", { href: runLink(run, `/steps/${r.step}`) }, `step ${r.step}`), `: ${counted(r.groups.length, "group")}, ${counted(r.tokens, "token")} for version ${r.version}${r.short ? `, short: ${r.short}` : ""}`],
  ACK: (r, run) => [h("a", { href: runLink(run, `/steps/${r.step}`) }, `step ${r.step}`), ` trained${r.feedback ? `: ${shorten(JSON.stringify(r.feedback), 200)}` : ""}`],
  POLICY: (r) => [`version ${r.version} published${r.adapter ? ` for ${r.adapter}` : ""}`, r.weights_uri ? `: ${r.weights_uri}` : ""],
  CHECKPOINT: (r) => `at step ${r.step}, kept: the newest ${r.keep}`,
  CONFIG: (r) => `${r.state ?? "running"}${r.reason ? ` (${r.reason})` : ""}${who(r)}, strategy ${r.config.strategy?.name ?? "default"}`,
  ATTACH: (r) => `epoch ${r.epoch} at step ${r.step}, ${counted(r.dp_world_size, "rank")}, ${counted(r.seq_len, "token")} per row`,
  REWIND: (r) => `to step ${r.step}, ${r.on_resume}, generation ${r.generation}`,
  EVICT: (r) => `${sizes(r.numbers)}, before step ${r.step}`,
  DEAD_LETTER: (r) => sizes(r.numbers),
  PURGE: (r) => `${counted(r.numbers.length, "dead letter")} deleted${who(r)}`,
  TICKET: (r) => `prompt ${r.prompt_index} failed after ${counted(r.attempts, "attempt")}: ${shorten(r.reason, 200)}`,
  COLUMNS: (r) => `late columns for ${counted(r.groups.length, "group")}`,
  LOSS: (r) => `accepted: ${counted(r.entries, "ledger entry", "ledger entries")} and ${counted(r.groups, "group")} that Redis lost${who(r)}`,
  TRIM: (r) => `groups up to ${count(r.groups)}, records up to ${count(r.entries)}`,
};

function describe(record, run) {
  return TEXTS[record.type]?.(record, run) ?? shorten(JSON.stringify(record), 300);
}
