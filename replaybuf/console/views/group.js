// One group: its life, and its rollouts side by side, as text or token ids, coloured by logprob, version or mask.

import { get, runPath } from "../api.js";
import { facts, h, pill, update } from "../dom.js";
import { count, counted, decimal, shorten } from "../format.js";
import { describeMoments, isSettled } from "../group_life.js";
import { joined, score, waysToKeepMore } from "../rollout_text.js";
import { runLink, runView } from "./frame.js";

const MOST_TOKENS = 2000;
const MOST_ROLLOUTS = 64;
// Nats from which a token gets a stronger colour: chosen with 60 %, 22 %, 5 %, 0.7 %.
const LOGPROB_EDGES = [-0.5, -1.5, -3, -5];
const MODES = [["text", "text"], ["logprob", "tokens by logprob"], ["version", "tokens by version"], ["mask", "tokens by mask"]];

export function openGroup({ query }, run, groupId) {
  const [life, list] = [h("div", {}), h("div", {})];
  let group = null;
  let seen = "";
  let [mode] = MODES.map(([name]) => name).filter((name) => name === query.get("show")).concat("text");
  const choice = h("select", { id: "show", change: (event) => paint((mode = event.target.value)) }, MODES.map(([value, name]) => h("option", { value, selected: value === mode }, name)));
  const bar = h("div", { class: "bar" }, h("div", {}, h("label", { for: "show" }, "Show"), choice));
  const view = runView(run, "Rollouts", [life, bar, list], { under: groupId, refresh, period_ms: 5000 });

  async function refresh() {
    if (group && !(await hasChanged())) return;
    group = await get(runPath(run, `/groups/${encodeURIComponent(groupId)}`), { pieces: "true" });
    update(view.state, pill(group.state));
    update(life, describeLife(run, group));
    paint();
  }

  // A group may have 64 MB: its metadata in a list of one says whether to read it again.
  async function hasChanged() {
    const page = await get(runPath(run, "/groups"), { after: group.number - 1, limit: 1 });
    const summary = page.groups.find((listed) => listed.number === group.number);
    if (!isSettled(group) && (await hasMoved())) return true;
    const moving = (group) => JSON.stringify([group.state, group.batches, group.late_columns]);
    return summary !== undefined && moving(summary) !== moving(group);
  }

  // Whether a step was trained or a version published since the last look.
  async function hasMoved() {
    const { row } = await get(runPath(run, "/flow"));
    const before = seen;
    seen = `${row.step} ${row.published_version}`;
    return seen !== before;
  }

  function paint() {
    bar.hidden = !group?.rollouts;
    if (group) list.replaceChildren(...(group.rollouts ? describeRollouts(group, mode) : describeSamples(group, run)));
  }

  return view;
}

function describeLife(run, group) {
  const moments = describeMoments(group, (step) => runLink(run, `/steps/${step}`));
  const pairs = [
    ["Prompt", group.prompt_id],
    ["Prompt index", group.prompt_index === null ? "–" : count(group.prompt_index)],
    ["Reward", `${decimal(group.reward_mean)} ± ${decimal(group.reward_std)}`],
    ["Mean |advantage|", decimal(group.advantage_abs_mean)],
    ["Tokens", `${count(group.tokens)}, longest rollout ${count(group.longest_tokens)}`],
    ["Cut at the token limit", `${count(group.truncated)} of ${count(group.group_size)}`],
    ["Uses", count(group.times_sampled)],
    group.adapter ? ["Adapter", group.adapter] : null,
  ].filter(Boolean);
  const metadata = group.metadata && Object.keys(group.metadata).length ? h("details", {}, h("summary", {}, "Metadata"), h("pre", { class: "change" }, shorten(JSON.stringify(group.metadata, null, 1), 5000))) : null;
  return [h("ol", { class: "life", "aria-label": "Life of the group" }, moments.map(([what, when]) => h("li", {}, what, when.map((line) => h("small", {}, line))))), facts(pairs), group.detail && h("p", { class: "bad" }, group.detail), metadata];
}

// What is left of a group whose bytes are gone.
function describeSamples(group, run) {
  const samples = group.samples ?? [];
  const freed = samples.length ? `The bytes of this group are freed; ${counted(samples.length, "rollout")} of ${count(group.group_size)} ${samples.length === 1 ? "stays" : "stay"} as a sample of its step.` : "The bytes of this group are freed, and none of its rollouts is a sample. Its metadata stays until the history is trimmed.";
  const cards = samples.map((sample) => card(sample, [h("p", { class: "quiet" }, `${sample.why}, step ${count(sample.step)}`), h("h4", {}, `Prompt, ${counted(sample.prompt_tokens, "token")}`), passage(joined(sample.prompt)), h("h4", {}, "Completion"), passage(joined(sample.completion))]));
  return [h("p", { class: "empty" }, freed), answerOf(samples[0]?.answer), cards.length > 0 && [h("h2", {}, counted(cards.length, "sample")), h("div", { class: "rollouts" }, cards)], waysToKeepMore(run)].flat().filter(Boolean);
}

const answerOf = (answer) => (["string", "number"].includes(typeof answer) ? h("p", { class: "answer" }, "Right answer: ", h("strong", {}, shorten(String(answer), 500))) : null);

// The worst rollout first: people look for what went wrong.
function describeRollouts(group, mode) {
  const ranked = group.rollouts.map((rollout, place) => ({ ...rollout, place })).sort((rollout, other) => rollout.reward - other.reward);
  const shown = ranked.slice(0, MOST_ROLLOUTS);
  const first = shown[0];
  const samePrompt = shown.every((rollout) => rollout.prompt_ids.length === first.prompt_ids.length && rollout.prompt_ids.every((id, place) => id === first.prompt_ids[place]));
  const prompt = samePrompt && [h("h2", {}, `Prompt, ${counted(first.prompt_ids.length, "token")}`), block(first.prompt_text, first.prompt_ids)];
  const note = first.completion_text === undefined ? h("p", { class: "quiet" }, "Token ids are shown. Start the service with ", h("code", {}, "--tokenizer FOLDER"), " to see text.") : null;
  const left = group.rollouts.length - shown.length;
  const body = (rollout) => [!samePrompt && block(rollout.prompt_text, rollout.prompt_ids), mode === "text" ? block(rollout.completion_text, rollout.completion_ids) : tokens(rollout, mode, group)];
  const cards = h("div", { class: "rollouts" }, shown.map((rollout) => card(rollout, body(rollout))));
  const head = `${counted(group.rollouts.length, "rollout")}${group.rollouts.length > 1 ? ", worst first" : ""}`;
  return [note, prompt, answerOf(group.metadata?.answer), h("h2", {}, head), legend(mode), cards, left > 0 && h("p", { class: "quiet" }, `${counted(left, "more rollout")} not shown.`)].flat().filter(Boolean);
}

function card(rollout, body) {
  const length = rollout.completion_tokens ?? rollout.completion_ids.length;
  const scores = [rollout.advantage === null || rollout.advantage === undefined ? null : `advantage ${decimal(rollout.advantage)}`, counted(length, "token"), rollout.finish_reason && shorten(rollout.finish_reason, 100)];
  const parts = Object.entries(rollout.rewards ?? {}).map(([name, value]) => `${name} ${decimal(value)}`);
  return h(
    "article",
    { class: "rollout" },
    h("header", {}, h("h3", {}, `Rollout ${rollout.place + 1}`), h("span", { class: "quiet" }, "reward ", score(rollout.reward), ` · ${scores.filter(Boolean).join(" · ")}`)),
    parts.length > 0 && h("p", { class: "quiet" }, shorten(parts.join(" · "), 500)),
    body,
  );
}

function block(text, ids) {
  const left = ids.length - MOST_TOKENS;
  const shown = text === undefined ? `${ids.slice(0, MOST_TOKENS).join(" ")}${left > 0 ? ` … (${counted(left, "more token")})` : ""}` : shorten(text);
  return passage(shown);
}

const passage = (shown) => h("pre", { class: "text", tabindex: "0" }, shown);

function tokens(rollout, mode, group) {
  const ids = rollout.completion_ids;
  const pieces = rollout.completion_pieces ?? [];
  const kind = { logprob: byLogprob, version: byVersion, mask: byMask }[mode](rollout, group);
  const shown = ids.slice(0, MOST_TOKENS).map((id, place) => {
    const [style, about] = kind(place);
    return h("span", { class: style, title: `token ${place}, id ${id}, ${about}` }, pieces[place] ?? `${id} `);
  });
  const left = ids.length - shown.length;
  return h("pre", { class: "text", tabindex: "0" }, shown, left > 0 && ` … (${counted(left, "more token")})`);
}

function byLogprob(rollout) {
  return (place) => {
    const value = rollout.inference_logprobs[place];
    return [`t${LOGPROB_EDGES.filter((edge) => value < edge).length}`, `logprob ${decimal(value)}`];
  };
}

function byVersion(rollout, group) {
  const spans = rollout.version_spans ?? [[group.policy_version, 0, rollout.completion_ids.length]];
  return (place) => {
    const span = spans.findIndex(([, first, end]) => place >= first && place < end);
    return [`v${Math.max(0, span) % 4}`, `version ${spans[span]?.[0] ?? "unknown"}`];
  };
}

function byMask(rollout) {
  const mask = rollout.completion_mask;
  return (place) => (mask && !mask[place] ? ["masked", "not sampled by the policy"] : ["t0", "in the loss"]);
}

function legend(mode) {
  if (mode === "logprob") return h("p", { class: "text legend" }, ["likely", "< 60 %", "< 22 %", "< 5 %", "< 0.7 %"].map((name, place) => h("span", { class: `t${place}` }, name)));
  if (mode === "mask") return h("p", { class: "quiet" }, "Tokens that are struck out were not sampled by the policy and are not in the loss.");
  return mode === "version" ? h("p", { class: "quiet" }, "A new colour begins where another policy version sampled. Hover for its number.") : null;
}
