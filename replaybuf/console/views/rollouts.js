// Rollouts of a run as text: one of each group, or the samples of trained steps; the address holds the question.

import { Problem, find, get, runPath } from "../api.js";
import { h, pill, table, update } from "../dom.js";
import { bytes, clockTime, count, counted, decimal, shorten, shortTime } from "../format.js";
import { describeParts, ends as shortened, joined, score, tokensOf, waysToKeepMore } from "../rollout_text.js";
import { runLink, runView } from "./frame.js";

const LIMIT = 25;
const SAMPLED_STEPS = 100;
// Rows that are shown until a person asks for all.
const MOST_SAMPLES = 50;
const WHY = { chance: "by chance" };
const STATES = ["", "live", "in_batches", "retired", "evicted", "dead_lettered"];
const ORDERS = [["", "arrival"], ["reward", "reward"], ["reward_std", "spread of rewards"], ["longest_tokens", "longest rollout"], ["staleness", "staleness"]];
const LISTS = [["", "Groups"], ["samples", "Samples of trained steps"], ["ends", "First step and newest"]];
// What people look for first: [name, order, direction].
const TABS = [["Newest", "", "true"], ["Best", "reward", "true"], ["Worst", "reward", "false"], ["Longest", "longest_tokens", "true"], ["Widest spread", "reward_std", "true"]];
const WHOLE = { min: "0", step: "1" };
// Name, label, type, what the field does, and its bounds.
const FIELDS = [
  ["text", "Text", "search", "Letters of a prompt or completion, in upper or lower case."],
  ["id_prefix", "Id", "search", "Start of the id of a group or of its prompt."],
  ["step", "Step", "number", "Groups that this step trained. Values: 0 or more.", WHOLE],
  ["min_reward", "Reward from", "number", "Lowest mean reward of a group."],
  ["max_reward", "Reward to", "number", "Highest mean reward of a group."],
  ["min_staleness", "Staleness from", "number", "Lowest staleness at the next step to assemble. Values: 0 or more.", WHOLE],
  ["source", "Source", "text", "The source, or else the env, of the group's metadata."],
];
const SAMPLE_ORDERS = { reward: (sample) => sample.reward, longest_tokens: (sample) => sample.completion_tokens };

export function openRollouts({ query, refreshNow }, run) {
  let all = false;
  const [note, rows, pages] = [h("div", { role: "status" }), h("div", { class: "texts" }), h("div", { class: "buttons" })];
  const sampled = query.get("list") === "samples";
  const settled = query.get("after") || query.get("before") || query.get("text");
  const ends = query.get("list") === "ends";
  const refresh = () => (ends ? listEnds() : sampled ? listSamples() : listGroups());
  const view = runView(run, "Rollouts", [lists(query, run), !ends && tabs(query, run, sampled), !ends && form(query, run), note, rows, pages], { refresh, period_ms: settled ? 0 : 5000 });
  pages.addEventListener("click", ({ target }) => target.closest("[data-all]") && ((all = true), refreshNow()));

  async function listGroups() {
    const asked = Object.fromEntries([...query].filter(([name]) => !["list", "text", "before"].includes(name)));
    asked.desc ??= "true";
    const text = query.get("text");
    if (text) asked.contains = text;
    const page = await get(runPath(run, "/groups"), { ...asked, limit: LIMIT, preview: "true" }).catch(text ? withoutText : null);
    if (page.reason) return void update(note, h("p", { class: "bad" }, page.reason));
    const freed = !page.groups.length && !text && query.get("step") ? await find(runPath(run, "/samples"), { step: query.get("step") }) : null;
    if (freed?.samples.length) {
      update(note, h("p", { class: "quiet" }, `The groups of step ${query.get("step")} are freed; these samples stay.`), waysToKeepMore(run));
      update(rows, sampleTable(run, sorted(freed.samples, query)));
    } else if (text) {
      update(note, h("p", { class: "quiet" }, lookedAt(page, query), " Freed groups keep no text but that of ", h("a", { href: address(run, with_(query, { list: "samples", after: "" })) }, "their samples"), "."));
      update(rows, previewTable(run, page.groups, `None of them has the text "${text}".`));
    } else {
      update(note, query.get("order") && h("p", { class: "quiet" }, "Freed groups are missing in this order. Look at ", h("a", { href: address(run, with_(query, { list: "samples" })) }, "their samples"), " instead."));
      update(rows, previewTable(run, page.groups, whyEmpty(query, page.next)));
    }
    update(pages, links(query, run, "after", page.next, text ? "Search further" : "Next page"));
  }

  async function listSamples() {
    const page = await get(runPath(run, "/samples"), { contains: query.get("text"), step: query.get("step"), before: query.get("before"), limit: SAMPLED_STEPS });
    const samples = sorted(page.samples.filter((sample) => meets(sample, query)), query);
    const total = `${counted(page.steps, "step")} ${page.steps === 1 ? "has" : "have"} samples, ${page.samples_per_step} of each.`;
    const shown = all ? samples : samples.slice(0, MOST_SAMPLES);
    const left = samples.length - shown.length;
    update(note, h("p", { class: "quiet" }, `${counted(shown.length, "sample")} shown; ${total}`), !samples.length && waysToKeepMore(run));
    update(rows, sampleTable(run, shown, query.get("text") ? `No sample has the text "${query.get("text")}".` : "No sample matches. The service takes samples after the trainer has acked a step."));
    update(pages, left > 0 && h("button", { type: "button", "data-all": "" }, `Show ${count(left)} more`), links(query, run, "before", page.next, "Next page"));
  }

  // What the model said at first, and what it says now.
  async function listEnds() {
    const newest = await get(runPath(run, "/samples"), { limit: 1 });
    const oldest = newest.oldest === null ? newest : await get(runPath(run, "/samples"), { step: newest.oldest });
    const part = ({ samples }, when) => [h("h2", {}, `Step ${count(samples[0].step)}, ${when}`), sampleTable(run, samples, "", `Samples of step ${samples[0].step}`)];
    const both = newest.samples.length && oldest.samples.length && newest.samples[0].step > newest.oldest;
    update(note, h("p", { class: "quiet" }, both ? "The best and the worst rollout of two steps, and others by chance." : "This list needs samples of two trained steps. The service takes them after the trainer has acked a step."), !both && waysToKeepMore(run));
    update(rows, both && [part(oldest, newest.oldest ? "the oldest with samples" : "the first"), part(newest, "the newest")].flat());
  }

  return view;
}

// The reason of a service that has no text to search, in place of a page.
function withoutText(error) {
  if (error instanceof Problem && error.document.name === "contains") return { reason: error.message };
  throw error;
}

// How far a search went: the service reads groups in the order of the page, up to a bound.
function lookedAt({ groups, next, searched }, query) {
  const which = query.get("order") ? "first" : query.get("desc") === "false" ? "oldest" : "newest";
  const part = query.get("after") ? counted(searched.groups, "further group") : next === null ? `all ${counted(searched.groups, "group")} that have bytes` : `the ${which} ${counted(searched.groups, "group")}`;
  return `Looked at ${part} (${bytes(searched.bytes)}): ${count(groups.length)} with this text.`;
}

function whyEmpty(query, next) {
  const prefix = query.get("id_prefix");
  if (!prefix) return "No group matches. Clear the filters, or wait for a producer to store one.";
  return next === null ? `No group and no prompt has an id that starts with "${prefix}".` : `None of the groups read so far has an id that starts with "${prefix}". The next page reads on.`;
}

// Whether a sample meets the conditions that the service does not compare.
function meets(sample, query) {
  const prefix = query.get("id_prefix") ?? "";
  const [least, most] = [query.get("min_reward"), query.get("max_reward")];
  if (least && sample.reward < Number(least)) return false;
  if (most && sample.reward > Number(most)) return false;
  return sample.group_id.startsWith(prefix) || sample.prompt_id.startsWith(prefix);
}

function sorted(samples, query) {
  const key = SAMPLE_ORDERS[query.get("order")];
  if (!key) return samples;
  const sign = query.get("desc") === "false" ? 1 : -1;
  return [...samples].sort((sample, other) => sign * (key(sample) - key(other)));
}

function links(query, run, name, next, further) {
  return [query.get(name) && h("a", { class: "button", href: address(run, with_(query, { [name]: "" })) }, "First page"), next !== null && h("a", { class: "button", href: address(run, with_(query, { [name]: next })) }, further)];
}

function lists(query, run) {
  const current = query.get("list") ?? "";
  const link = ([list, name]) => h("a", { class: "button", href: address(run, with_(query, { list, after: "", before: "" })), "aria-current": list === current ? "true" : null }, name);
  return h("nav", { class: "choice", "aria-label": "What to list" }, LISTS.map(link));
}

function tabs(query, run, sampled) {
  const [order, desc] = [query.get("order") ?? "", query.get("desc") ?? "true"];
  const link = ([name, by, direction]) => h("a", { class: "button", href: address(run, with_(query, { order: by, desc: direction, after: "", before: "" })), "aria-current": order === by && desc === direction ? "true" : null }, name);
  return h("nav", { class: "choice", "aria-label": "Order" }, TABS.filter(([, by]) => !sampled || !by || SAMPLE_ORDERS[by]).map(link));
}

function form(query, run) {
  const control = (name, label, hint, node) => h("div", { class: "field" }, h("label", { for: `f-${name}` }, label), node, h("span", { class: "hint", id: `h-${name}` }, hint));
  const attributes = (name) => ({ id: `f-${name}`, name, "aria-describedby": `h-${name}` });
  const inputs = FIELDS.map(([name, label, type, hint, bounds]) => control(name, label, hint, h("input", { ...attributes(name), type, step: "any", ...bounds, maxlength: 250, autocomplete: "off", value: query.get(name) ?? "" })));
  const choice = (name, fallback, options) => h("select", attributes(name), options.map(([value, shown]) => h("option", { value, selected: (query.get(name) ?? fallback) === value }, shown)));
  const state = control("state", "State", "Where the group is now.", choice("state", "", STATES.map((name) => [name, name.replaceAll("_", " ") || "any"])));
  const order = control("order", "Order", "Freed groups appear only in the order of arrival.", choice("order", "", ORDERS));
  const desc = control("desc", "Direction", "Of the order.", choice("desc", "true", [["true", "highest first"], ["false", "lowest first"]]));
  const submit = (event) => {
    event.preventDefault();
    location.hash = address(run, new URLSearchParams([...new FormData(event.target), ["list", query.get("list") ?? ""]]));
  };
  const buttons = h("div", { class: "buttons" }, h("button", { type: "submit", class: "main" }, "Show"), h("a", { class: "button", href: runLink(run, "/rollouts") }, "Clear"));
  const chosen = [...query].filter(([name, value]) => value && !["order", "desc", "after", "before", "list"].includes(name));
  const named = chosen.map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ");
  // Links of other pages choose a step, and on a phone the form has the whole window: open, it would hide the rollouts.
  const open = chosen.some(([name]) => name !== "step") && matchMedia("(min-width: 601px)").matches;
  return h("details", { class: "fields", open }, h("summary", {}, "Search and filters", named && `: ${shorten(named, 80)}`), h("form", { submit }, h("div", { class: "grid" }, inputs, state, order, desc), buttons));
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

const groupLink = (run, group) => h("a", { href: runLink(run, `/groups/${encodeURIComponent(group.group_id)}`) }, group.group_id);
const small = (...parts) => h("small", {}, parts);
const words = (text) => h("div", { class: "words" }, text);
const prompt = (group, shown, match) => [match?.part === "prompt" && excerpt(match), words(shown ? shortened(joined(shown.prompt), 80, 240) : "–"), small(group.prompt_id)];
const completion = (shown, match) => [match?.part === "completion" && excerpt(match), words(shortened(joined(shown.completion), 260, 260)), small(tokensOf(shown), shown.finish_reason ? `, ${shown.finish_reason}` : "", shown.answer ? `; right answer: ${shown.answer}` : "")];
// The place where a search found its text.
const excerpt = ({ place, before, text, behind }) => h("div", {}, small(`Rollout ${place + 1} has it:`), h("div", { class: "words" }, "… ", before, h("mark", {}, text), behind, " …"));
const reward = (shown) => [score(shown.reward), small(describeParts(shown.rewards))];

// One rollout of each group, with the reward of this rollout and of the whole group.
function previewTable(run, groups, empty) {
  const missing = (group) => h("span", { class: "quiet" }, group.state === "retired" ? "Freed, without a sample." : "Too large for this list. Open the group to read it.");
  const columns = [
    ["Group", "name", (group) => [groupLink(run, group), " ", pill(group.reason ?? group.state), small(`version ${count(group.policy_version)}, ${counted(group.group_size, "rollout")}`)]],
    ["Prompt", "", (group) => prompt(group, group.preview, group.match)],
    ["Completion", "", (group) => (group.preview ? completion(group.preview, group.match) : missing(group))],
    ["Reward", "", (group) => [group.preview ? reward(group.preview) : null, small(`group ${decimal(group.reward_mean)} ± ${decimal(group.reward_std, 2)}`)].flat()],
    ["Steps", "", (group) => [steps(run, group.batches), small(`stored ${shortTime(group.arrival_s)}`)].flat(4)],
  ];
  return table("Groups", columns, groups, empty);
}

function sampleTable(run, samples, empty, caption = "Samples") {
  const columns = [
    ["Group", "name", (sample) => [groupLink(run, sample), " ", pill(WHY[sample.why] ?? sample.why), small(`version ${count(sample.policy_version)}, rollout ${sample.place + 1}`)]],
    ["Prompt", "", (sample) => prompt(sample, sample)],
    ["Completion", "", completion],
    ["Reward", "", reward],
    ["Steps", "", (sample) => h("a", { href: runLink(run, `/steps/${sample.step}`) }, String(sample.step))],
  ];
  return table(caption, columns, samples, empty);
}

// Groups with their state, scores and the steps that used them.
export function groupTable(run, groups, empty) {
  const columns = [
    ["Group", "name", (group) => groupLink(run, group)],
    ["State", "", (group) => pill(group.reason ?? group.state)],
    ["Prompt", "name", (group) => group.prompt_id],
    ["Version", "number", (group) => count(group.policy_version)],
    ["Reward", "number", (group) => h("span", { class: group.reward_mean > 0 ? "good" : group.reward_mean < 0 ? "bad" : "" }, `${decimal(group.reward_mean)} ± ${decimal(group.reward_std, 2)}`)],
    ["|Advantage|", "number", (group) => decimal(group.advantage_abs_mean)],
    ["Rollouts", "number", (group) => count(group.group_size)],
    ["Tokens", "number", (group) => count(group.tokens)],
    ["Steps", "number", (group) => steps(run, group.batches)],
    ["Stored", "number", (group) => clockTime(group.arrival_s)],
  ];
  return table("Groups", columns, groups, empty);
}

function steps(run, batches) {
  if (!batches.length) return "–";
  const shown = batches.slice(-3).map((step) => [h("a", { href: runLink(run, `/steps/${step}`) }, String(step)), " "]);
  return batches.length > 3 ? ["… ", shown] : shown;
}
