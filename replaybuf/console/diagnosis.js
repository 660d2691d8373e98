// What a run does now: works, waits for longer than usual, or stopped; why, and what a person can do.

import { age, count, counted, explainReason } from "./format.js";

// A client that is silent for longer, and for most of the time that the run stands still, is the cause.
const SILENT_S = 15;

// Kind for the colour, what happens in a sentence, details, what to do, and where to look.
export function diagnose(row) {
  if (row.state === "finished") return { kind: "", what: "The run is finished.", details: [], todo: explainReason("finished")[1] };
  if (row.state === "paused" && row.paused_reason !== "operator") return { kind: "stopped", what: "The run paused itself.", details: [row.paused_reason], todo: "Repair the cause, then resume the run.", page: "/act" };
  if (row.alarm) return { kind: "stopped", what: "Too many prompts fail.", details: [row.alarm], todo: "The newest reasons are under Problems.", page: "/problems" };
  if (row.state === "paused") return { kind: "waits", what: "An operator paused the run.", details: [`no new batch or ack ${since(row)}`], todo: "Resume it when you have removed the reason.", page: "/act" };
  const [cause, ...others] = row.stands_still ? findCauses(row) : [];
  if (cause) return { kind: "stopped", ...cause, details: [...others.map((other) => other.what), `The run stands still ${since(row)}`, ...amounts(row.waiting)] };
  if (!row.waiting) return { kind: row.stands_still ? "stopped" : "", what: "The next batch is ready.", details: [`no new batch or ack ${since(row)}`], todo: "The trainer can request it now." };
  const [what, todo] = explainReason(row.waiting.reason);
  const details = [`${row.waiting.reason} for ${age(row.waiting_s)}`, `no new batch or ack ${since(row)}`, ...amounts(row.waiting), ...missing(row.waiting)];
  if (row.stands_still) return { kind: "stopped", what, details: ["the run stands still", ...details], todo, page: row.waiting.blocked_on === "producers" ? "/problems" : "" };
  if (row.idle_s === null) return { kind: "waits", what, details, todo };
  return { kind: "", what: "The run works.", details: [`The next batch waits: ${what}`, ...details], todo: "Such a wait is usual between two batches." };
}

// What is dead while the run stands still. Engines come first: a trainer that cannot load its weights into them may end too.
function findCauses(row) {
  const dead = (seconds) => seconds !== null && seconds > Math.max(SILENT_S, 0.5 * (row.idle_s ?? 0));
  const { trainer_last_seen_s: trainer, producers_last_seen_s: producers, producers_without_engine: hungry } = row;
  const engines = hungry > 0 && { place: "Producers", what: row.producers_known === 1 ? "No engine takes the requests of the producer." : `No engine takes the requests of ${count(hungry)} of ${counted(row.producers_known, "producer")}.`, todo: "Look at the engines and their logs, then start them again. Then look at the trainer: it loads its weights into them.", page: "/problems" };
  const trained = dead(trainer) && { place: "Trainer", what: `The trainer is gone: no call for ${age(trainer)}.`, todo: "Look at its process and its log, then start it again. It resumes at its checkpoint and gets the same batches." };
  const produced = dead(producers) && { place: "Producers", what: `The producers are gone: no call for ${age(producers)}.`, todo: "Look at their processes and logs, then start them again. The service gives their tickets to other producers.", page: "/problems" };
  const both = row.waiting?.blocked_on === "producers" ? [produced, trained] : [trained, produced];
  return [engines, ...both].filter(Boolean);
}

const since = (row) => (row.idle_s === null ? "since the run began" : `for ${age(row.idle_s)}`);

const amounts = (waiting) => ["groups", "tokens"].filter((name) => waiting?.need[name]).map((name) => `${count(waiting.have[name])} of ${counted(waiting.need[name], name.slice(0, -1))}`);

const missing = (waiting) => (waiting.missing ?? []).map((process) => `${process.name} was last seen ${age(process.last_seen_s)} ago`);

// Producers that a person has to look for: those of a finished run may leave.
export const goneOf = (row) => (row.state === "finished" ? 0 : row.producers_gone);

// How many things under Problems need a person.
export const problemsOf = (row) => goneOf(row) + row.dead_lettered + (row.alarm ? 1 : 0);
