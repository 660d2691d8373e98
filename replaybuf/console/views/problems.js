// Producers, engines, dead letters and failed prompts: who, since when, why, and what to do.

import { find, get, runPath } from "../api.js";
import { h, pill, table, update } from "../dom.js";
import { age, clockTime, count, counted, decimal, shorten } from "../format.js";
import { groupTable } from "./rollouts.js";
import { runLink, runView } from "./frame.js";

const LIMIT = 100;

export function openProblems(_, run) {
  const [producers, letters, prompts] = [h("div", {}), h("div", {}), h("div", {})];
  const view = runView(run, "Problems", [producers, letters, prompts], { refresh, period_ms: 3000 });

  async function refresh() {
    const [known, dead, failed] = await Promise.all([get(runPath(run, "/producers")), find(runPath(run, "/dead-letters"), { limit: LIMIT }), find(runPath(run, "/failed-prompts"), { limit: LIMIT })]);
    update(producers, describeProducers(known.producers));
    update(letters, describeLetters(run, dead?.dead_letters ?? []));
    update(prompts, describePrompts(failed ?? { failed: 0, failed_prompts: [] }));
  }

  return view;
}

function describeProducers(producers) {
  const columns = [
    ["Producer", "name", (producer) => producer.name],
    ["State", "", (producer) => pill(producer.gone ? "gone" : producer.heartbeats ? "live" : "no heartbeats")],
    ["Last seen", "number", (producer) => `${age(producer.last_seen_s)} ago`],
    ["Tickets out", "number", (producer) => count(producer.tickets_out)],
    ["Groups/min", "number", (producer) => decimal(producer.groups_per_min, 1)],
    ["Faults", "number", (producer) => count(producer.faults)],
    ["In flight", "number", (producer) => count(producer.in_flight)],
    ["Engines", "number", (producer) => (producer.engines === 0 ? h("span", { class: "bad" }, "0") : count(producer.engines))],
    ["Held back by", "", (producer) => producer.held_back_by ?? "–"],
  ];
  const gone = producers.filter((producer) => producer.gone).length;
  const idle = producers.filter((producer) => producer.engines === 0).length;
  return [
    h("h2", {}, "Producers and their engines"),
    gone > 0 && h("p", { class: "bad" }, `${counted(gone, "producer")} stopped sending heartbeats. Other producers get the tickets. Look at the logs, then start each again.`),
    idle > 0 && h("p", { class: "bad" }, `${counted(idle, "producer")} ${idle === 1 ? "has" : "have"} no engine that takes requests. Check that the engines run and have the published weights.`),
    table("Producers", columns, producers, "No producer called within the last hour. Start producer: replaybuf generate."),
    ...describeFailures(producers.filter((producer) => producer.failure)),
  ];
}

function describeFailures(producers) {
  if (!producers.length) return [];
  const where = ({ prompt_index: index }) => (index === null ? "" : ` at prompt ${count(index)}`);
  const since = ({ lasts }) => (lasts ? "no group stored since" : "groups stored since");
  return [
    h("h3", {}, "Newest failure of each producer"),
    producers.map(({ name, failure }) =>
      h(
        "details",
        { class: "failure" },
        h("summary", { class: failure.lasts ? "bad" : null }, `${name}: ${failure.reason}${where(failure)}, ${age(failure.age_s)} ago, ${since(failure)}`),
        h("pre", { class: "change" }, failure.traceback),
      ),
    ),
  ];
}

function describeLetters(run, letters) {
  const help = letters.length > 0 && h("p", {}, "These groups were stored and cannot be used. A missing or broken frame points to Redis or to a producer that writes to it directly. ", h("a", { href: runLink(run, "/act") }, "Purge them"), " when you have seen the cause.");
  return [h("h2", {}, "Dead letters"), help, groupTable(run, letters, "No dead letters: every stored group could be read.")];
}

function describePrompts({ failed, failed_prompts: newest }) {
  const columns = [
    ["Prompt", "number", (prompt) => count(prompt.prompt_index)],
    ["Adapter", "", (prompt) => prompt.adapter || "–"],
    ["Failed", "number", (prompt) => clockTime(prompt.at_s)],
    ["Attempts", "number", (prompt) => count(prompt.attempts)],
    ["Reason", "name", (prompt) => shorten(prompt.reason, 300)],
  ];
  const help = failed > 0 && h("p", {}, `${counted(failed, "prompt")} failed tickets.max_attempts times and ${failed === 1 ? "has" : "have"} no group. The reason names the part that failed: engine, environment or reward.`);
  return [h("h2", {}, "Failed prompts"), help, table("Failed prompts", columns, [...newest].reverse(), "No prompt has failed.")];
}
