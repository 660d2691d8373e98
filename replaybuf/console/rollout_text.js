// Text of rollouts for tables and pages: cut in the middle, or token ids where there is no text.

import { h } from "./dom.js";
import { counted, decimal, shorten } from "./format.js";

const MOST_PARTS = 16;

// The pieces of a prompt or a completion as one text.
export const joined = (pieces) => pieces.map((piece) => (typeof piece === "string" ? piece : piece.join(" "))).join("\n … \n");

// The start and the end of a text, at most so many letters each.
export function ends(text, start, end) {
  return text.length <= start + end ? text : `${text.slice(0, start)} … ${text.slice(text.length - end)}`;
}

// A reward in colour: green above 0, red below.
export function score(value) {
  return h("span", { class: `score ${value > 0 ? "good" : value < 0 ? "bad" : "warn"}` }, decimal(value));
}

export function describeParts(rewards) {
  const parts = Object.entries(rewards ?? {}).slice(0, MOST_PARTS);
  return shorten(parts.map(([name, value]) => `${name} ${decimal(value)}`).join(" · "), 500);
}

// How to keep more of what checkpoints free.
export function waysToKeepMore(run) {
  return h(
    "p",
    { class: "quiet" },
    "To keep more: ",
    h("code", {}, "history.samples_per_step"),
    ", which is set when the run is created, keeps up to 64 rollouts of each trained step. A cursor keeps whole groups until its reader has them. ",
    h("code", {}, `replaybuf export ${run} --to FOLDER`),
    " writes all groups to files.",
  );
}

export const tokensOf = (rollout) => `${counted(rollout.prompt_tokens, "token")} → ${counted(rollout.completion_tokens, "token")}`;
