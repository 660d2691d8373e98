// The life of a group as one line: each moment with its time, its version, and the time since the moment before.

import { h } from "./dom.js";
import { age, clockTime, count, counted } from "./format.js";

const NAMES = { ticket: "ticket", sampled: "sampled", stored: "stored", batch: "batch", trained: "trained", published: "published", evicted: "evicted", dead_lettered: "dead lettered", freed: "freed" };
const NOW = { live: ["waiting", "a batch may use it"], in_batches: ["kept", "a resume may need it"] };

// Pairs of what happened and lines about it; `linkOf(step)` is the address of a step.
export function describeMoments(group, linkOf) {
  const shown = [];
  let before = null;
  for (const moment of group.life) {
    const passed = before && moment.at_s ? `${age(Math.max(0, moment.at_s - before))} later` : null;
    before = moment.at_s ?? before;
    shown.push([nameOf(moment, linkOf), [moment.at_s ? clockTime(moment.at_s) : null, passed, versionOf(moment), moment.reason, moment.what === "sampled" ? turnsOf(group) : null].filter(Boolean)]);
    if (moment.what === "stored") shown.push(...group.late_columns.map((name) => ["column added", [name]]));
  }
  if (NOW[group.state]) shown.push([NOW[group.state][0], [NOW[group.state][1]]]);
  return shown;
}

function nameOf({ what, step }, linkOf) {
  return step === undefined || step === null ? NAMES[what] ?? what : h("a", { href: linkOf(step) }, `${NAMES[what] ?? what}, step ${count(step)}`);
}

function versionOf({ what, version, until_version: until }) {
  if (version === undefined || version === null) return null;
  if (what === "sampled") return `by version ${until ? `${version} to ${until}` : version}`;
  return { stored: `version ${version} was published`, batch: `to train version ${version}`, trained: `version ${version}`, published: `version ${version}`, evicted: `at version ${version}` }[what] ?? null;
}

// Whether the steps that used the group are trained and published, so that its line grows only with its state.
export function isSettled({ life }) {
  const last = (what) => life.findLastIndex((event) => event.what === what);
  return last("published") >= last("batch");
}

// Turns of its rollouts and requests to engines, where the generator recorded them.
function turnsOf({ metadata }) {
  const turns = Array.isArray(metadata?.turns) ? metadata.turns.slice(0, 1000).filter(Number.isFinite) : [];
  const [least, most] = [Math.min(...turns), Math.max(...turns)];
  if (turns.length) return `${least === most ? counted(most, "turn") : `${count(least)} to ${counted(most, "turn")}`} per rollout`;
  return Number.isFinite(metadata?.requests) ? counted(metadata.requests, "request") : null;
}
