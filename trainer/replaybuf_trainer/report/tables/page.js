"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const place = Object.fromEntries(data.columns.map((name, index) => [name, index]));
const get = (id) => document.getElementById(id);

// Where the scale of a column is neutral, and the distance at which its colours are full.
// "log": the ratio, whose inverse is as far from 1 as itself. "max": the largest value of the page.
const SCALES = {
  ratio: { label: "ratio", kind: "log", full: Math.log(1.5) },
  difference: { label: "logprob of trainer - engine", kind: "max" },
  loss_share: { label: "share of the loss", kind: "max" },
  token_advantage: { label: "advantage", kind: "max" },
  entropy: { label: "entropy", kind: "max" },
  trainer_logprob: { label: "logprob of the trainer", kind: "max" },
  engine_logprob: { label: "logprob of the engine", kind: "max" },
};

function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

function fact(label, value) {
  const made = element("span", `${label} `);
  made.append(element("b", value));
  return made;
}

const number = (text) => (text === null ? NaN : Number(text === "inf" ? Infinity : text === "-inf" ? -Infinity : text));
const shown = (value) => (value === null ? "-" : String(value));
// A line break keeps its effect and can be seen and pointed at.
const visible = (text) => (text === "" ? "∅" : text.replace(/\n/g, "↵\n"));

function largest(column) {
  let most = 0;
  for (const sample of data.samples)
    for (const value of sample.values[column]) {
      const size = Math.abs(number(value));
      if (Number.isFinite(size)) most = Math.max(most, size);
    }
  return most || 1;
}

const tokens = [];
for (const sample of data.samples) {
  const box = element("article");
  const head = element("h2", `${sample.group_id} #${sample.rollout}`);
  if (sample.adapter) head.append(fact("adapter", sample.adapter));
  head.append(
    fact("reward", shown(sample.reward)),
    ...Object.entries(sample.reward_parts).map(([name, part]) => fact(name, shown(part))),
    fact("advantage", shown(sample.advantage)),
    fact("version", `${sample.policy_version} (staleness ${sample.staleness})`),
    fact("use", String(sample.times_sampled)),
    fact("tokens", `${sample.prompt_tokens} + ${sample.length}`),
  );
  const prompt = element("details");
  prompt.append(element("summary", "prompt"), element("p", sample.prompt, "text"));
  if (sample.prompt_left) prompt.append(element("p", `... ${sample.prompt_left} more characters in samples.parquet`, "left"));
  const text = element("p", undefined, "text");
  sample.texts.forEach((token, index) => {
    const made = element("span", visible(token), "token");
    if (!sample.mask[index]) made.classList.add("masked");
    if (number(sample.values[place.clipped][index]) > 0) made.classList.add("clipped");
    made.tabIndex = -1;
    tokens.push({ made, sample, index });
    made.dataset.token = String(tokens.length - 1);
    text.append(made);
  });
  const left = sample.length - sample.texts.length;
  if (left) text.append(element("span", ` ... ${left} more tokens in samples.parquet`, "left"));
  box.append(head, prompt, text);
  get("samples").append(box);
}

function colour(name) {
  const scale = SCALES[name], column = place[name];
  const full = scale.kind === "max" ? largest(column) : scale.full;
  for (const { made, sample, index } of tokens) {
    const value = number(sample.values[column][index]);
    const distance = scale.kind === "log" ? Math.log(value) : value;
    made.style.background = "";
    if (Number.isNaN(distance)) continue;
    const share = Math.min(1, Math.abs(distance) / full);
    const side = distance < 0 ? "--low" : "--high";
    made.style.background = `color-mix(in srgb, var(${side}) ${Math.round(share * 65)}%, transparent)`;
  }
  const ends = scale.kind === "log" ? [Math.exp(-full), Math.exp(full)] : [-full, full];
  get("low").textContent = ends[0].toPrecision(2);
  get("high").textContent = ends[1].toPrecision(2);
}

function describe({ sample, index }) {
  const row = element("div");
  row.append(element("code", JSON.stringify(sample.texts[index])), fact("token", `${sample.ids[index]} at ${index}`));
  for (const name of data.columns) row.append(fact(name.replaceAll("_", " "), shown(sample.values[place[name]][index])));
  get("details").replaceChildren(row);
  get("details").hidden = false;
}

for (const [name, { label }] of Object.entries(SCALES)) {
  const option = element("option", label);
  option.value = name;
  get("column").append(option);
}
get("column").addEventListener("change", (event) => colour(event.target.value));
document.addEventListener("mouseover", (event) => {
  const found = event.target.closest?.("[data-token]");
  if (found) describe(tokens[Number(found.dataset.token)]);
});
// Arrow keys move from token to token once one has the focus by a click.
document.addEventListener("click", (event) => event.target.closest?.("[data-token]")?.focus());
document.addEventListener("keydown", (event) => {
  const at = document.activeElement?.dataset?.token;
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const next = at === undefined || !by ? undefined : tokens[Number(at) + by];
  if (!next) return;
  event.preventDefault();
  next.made.focus();
  describe(next);
});

document.title = `${data.run} step ${data.step} - replaybuf samples`;
get("title").textContent = `Run ${data.run}, step ${data.step}`;
const parts = Object.entries(data.reward_parts).map(([name, mean]) => `${name} ${shown(mean)}`);
get("facts").textContent =
  `${data.samples.length} rollouts, trained as version ${data.version} with the loss ${data.loss}` +
  (parts.length ? `. Mean rewards of the batch: ${parts.join(", ")}` : "");
const folder = (step) => `../step-${String(step).padStart(6, "0")}/index.html`;
get("next").href = folder(data.step + 1);
if (data.step > 0) get("previous").href = folder(data.step - 1);
else get("previous").hidden = true;
colour("ratio");
