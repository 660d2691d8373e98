// The configuration of a run as a form, and as JSON behind a tab. The fields come from the service's own schema.

import { get } from "./api.js";
import { adapterRows, pluginRows, same } from "./config_rows.js";
import { h } from "./dom.js";
import { field } from "./fields.js";

let known = null;

// The schemas of the service, and the options of its plug-ins.
export async function loadSchemas() {
  known ??= await get("/openapi.json").then((document) => ({ schemas: document.components.schemas, plugins: document["x-plugins"] }));
  return known;
}

// `values` are those of the start, `parts` of the configuration become sections: [heading, part or "" for the run's own
// fields, open, names of its fields; all of them if left out]. Other parts of `values` are only in the JSON. `changed`
// hears of each change.
export function configForm({ schemas, plugins }, parts, values, { id, label, changed = () => {} }) {
  const form = h("div", { id: `${id}-form`, role: "tabpanel", "aria-labelledby": `${id}-tab-form` });
  const text = h("textarea", { id, spellcheck: "false", "aria-label": label, input: changed });
  const json = h("div", { id: `${id}-json`, role: "tabpanel", "aria-labelledby": `${id}-tab-json`, hidden: true }, text);
  const tabs = { form: tab("Form", () => select("form")), json: tab("JSON", () => select("json")) };
  const wrong = h("p", { class: "bad", role: "status" });
  let fields = [];
  let lists = {}; // parts that are lists, by name
  let [original, start] = [null, null];
  let picked = null; // the strategy: how to ask its name, and its name at the start
  set(values);

  function tab(name, click) {
    const part = name.toLowerCase();
    return h("button", { type: "button", role: "tab", id: `${id}-tab-${part}`, "aria-controls": `${id}-${part}`, "aria-selected": String(part === "form"), click }, name);
  }

  function select(part) {
    const now = read();
    if (!now) return;
    if (part === "json") text.value = JSON.stringify(now, null, 2);
    else build(now);
    for (const [name, button] of Object.entries(tabs)) button.setAttribute("aria-selected", String(name === part));
    [form.hidden, json.hidden] = [part !== "form", part !== "json"];
  }

  function set(now) {
    original = now;
    text.value = JSON.stringify(now, null, 2);
    build(now);
  }

  function build(now) {
    start = structuredClone(now);
    fields = [];
    lists = {};
    form.replaceChildren(...("strategy" in now ? [strategy(now.strategy)] : []), ...parts.map((part) => section(now, ...part)));
  }

  function add(name, schema, value) {
    const made = field(name, schema, value, changed);
    fields.push({ ...made, default: schema.default ?? null });
    return made.node;
  }

  function propertiesOf(schema) {
    const { $ref } = schema.anyOf?.find((kind) => kind.$ref) ?? schema;
    return schemas[$ref.split("/").at(-1)].properties;
  }

  function section(now, heading, part, open, only) {
    const whole = schemas.RunConfig.properties[part];
    if (whole?.items || whole?.additionalProperties) return list(now, heading, part, whole);
    const of = part ? propertiesOf(whole) : schemas.RunConfig.properties;
    const values = part ? (now[part] ?? {}) : now;
    const optional = whole?.anyOf ? { default: null } : {}; // a part that may be null: empty fields
    const nodes = (only ?? Object.keys(of)).map((name) => add(part ? `${part}.${name}` : name, { ...of[name], ...optional }, name in values ? values[name] : of[name].default));
    return h("details", { class: "fields", open }, h("summary", {}, heading), h("div", { class: "grid" }, nodes));
  }

  function list(now, heading, part, { items, additionalProperties, description }) {
    const { name, options, ...own } = propertiesOf(items ?? additionalProperties);
    const made = items ? pluginRows(part, heading, description, plugins[part] ?? {}, own, now[part] ?? [], changed) : adapterRows(heading, description, own, now[part] ?? {}, changed);
    lists[part] = made;
    return made.node;
  }

  // The strategy: choosing another one shows its own options.
  function strategy(spec) {
    const grid = h("div", { class: "grid" });
    const about = h("p", { class: "quiet" });
    const names = [...new Set([...Object.keys(plugins.strategies), spec.name])];
    const chosen = h("select", { id: `${id}-strategy`, change: () => (show(chosen.value, {}), changed()) }, names.map((name) => h("option", { value: name }, name)));
    const show = (name, options) => {
      const { description = "", properties = {} } = plugins.strategies[name] ?? {};
      about.textContent = description.split("\n\n")[0];
      fields = fields.filter(({ name: place }) => !place.startsWith("strategy.options."));
      grid.replaceChildren(...Object.entries(properties).map(([key, schema]) => add(`strategy.options.${key}`, schema, key in options ? options[key] : schema.default)));
    };
    chosen.value = spec.name;
    show(spec.name, spec.options);
    picked = { name: () => chosen.value, before: spec.name };
    return h("details", { class: "fields", open: true }, h("summary", {}, "Strategy"), h("label", { for: `${id}-strategy` }, "Name"), chosen, about, grid);
  }

  // The whole configuration; null, with the reason on the page, if a field or the JSON is wrong.
  function read() {
    wrong.textContent = "";
    return form.hidden ? readText() : readFields();
  }

  function readText() {
    try {
      return JSON.parse(text.value);
    } catch (error) {
      wrong.textContent = `The text is not JSON: ${error.message}`;
      return null;
    }
  }

  function readFields() {
    const now = structuredClone(start);
    if (picked) now.strategy = { name: picked.name(), options: picked.name() === picked.before ? now.strategy.options : {} };
    const bad = [];
    for (const { name: place, read: ask, default: usual } of fields) {
      const { value, wrong: refused } = ask();
      if (refused) bad.push(place);
      const path = place.split(".");
      const last = path.pop();
      const holder = path.reduce((part, key) => part?.[key], now);
      if (last in (holder ?? {}) || !same(value ?? null, usual)) path.reduce((part, key) => (part[key] ??= {}), now)[last] = value;
    }
    for (const [part, { read: ask }] of Object.entries(lists)) {
      const { value, wrong: refused } = ask();
      bad.push(...refused);
      if (part in now || Object.keys(value).length) now[part] = value;
    }
    if (bad.length) wrong.textContent = `Correct ${bad.join(", ")} first.`;
    return bad.length ? null : now;
  }

  // Show a problem of the service at the field that it names; elsewhere if there is none.
  function blame({ name, detail }) {
    const place = fields.find((field) => field.name === name);
    if (place && !form.hidden) place.blame(detail);
    else wrong.textContent = detail;
  }

  const node = h("div", {}, h("div", { class: "choice", role: "tablist", "aria-label": label }, tabs.form, tabs.json), form, json, wrong);
  return { node, read, set, blame, started: () => original };
}
