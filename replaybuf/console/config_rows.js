// Parts of a configuration that are lists, as rows that a person adds and removes: plug-ins in their order, LoRA
// adapters by name. Each has `node`, and `read()`: { value, wrong: places of fields that are wrong }.

import { h } from "./dom.js";
import { field } from "./fields.js";

export const same = (left, right) => JSON.stringify(left) === JSON.stringify(right);

// Rows under a heading. `makeRow(start, number)` gives { label, nodes, read }; `add` is what the button makes a row of.
function rows(heading, about, starts, makeRow, chooser, changed) {
  let made = [];
  let count = 0;
  const list = h("div", {});
  const append = (start) => {
    const row = makeRow(start, count++);
    const remove = h("button", { type: "button", click: () => (row.node.remove(), (made = made.filter((other) => other !== row)), changed()) }, "Remove");
    row.node = h("div", { class: "card", role: "group", "aria-label": row.label }, row.nodes, h("div", { class: "buttons" }, remove));
    made.push(row);
    list.append(row.node);
  };
  starts.forEach(append);
  const add = chooser((start) => (append(start), changed()));
  const node = h("details", { class: "fields", open: starts.length > 0 }, h("summary", {}, heading), h("p", { class: "quiet" }, about), list, add);
  return { node, read: () => made.map((row) => row.read()) };
}

// The values of fields that differ from their defaults, or that `start` names.
function valuesOf(fields, start) {
  const values = {};
  const wrong = [];
  for (const { key, name, read, usual } of fields) {
    const { value, wrong: refused } = read();
    if (refused) wrong.push(name);
    if (key in start || !same(value ?? null, usual)) values[key] = value;
  }
  return { values, wrong };
}

function fieldsOf(place, properties, start, changed) {
  return Object.entries(properties).map(([key, schema]) => ({ ...field(`${place}.${key}`, schema, key in start ? start[key] : schema.default, changed), key, usual: schema.default ?? null }));
}

// Filters or admissions. `installed`: plug-ins by name; `own`: fields of an entry beside its name and options.
export function pluginRows(part, heading, about, installed, own, entries, changed) {
  const names = Object.keys(installed);
  const makeRow = (entry, number) => {
    const { name, options = {} } = entry;
    const { description = "", properties = {} } = installed[name] ?? {};
    const fields = fieldsOf(`${part}.${number}.options`, properties, options, changed);
    const others = fieldsOf(`${part}.${number}`, own, entry, changed);
    const read = () => {
      const [inside, beside] = [valuesOf(fields, options), valuesOf(others, entry)];
      return { value: { ...entry, ...beside.values, options: { ...options, ...inside.values } }, wrong: [...inside.wrong, ...beside.wrong] };
    };
    return { label: name, nodes: [h("strong", {}, name), h("p", { class: "quiet" }, description.split("\n\n")[0]), h("div", { class: "grid" }, [...fields, ...others].map(({ node }) => node))], read };
  };
  const chooser = (append) => {
    if (!names.length) return h("p", { class: "quiet" }, "None is installed in the service.");
    const chosen = h("select", { id: `add-${part}`, "aria-label": `Add to ${part}` }, names.map((name) => h("option", { value: name }, name)));
    return h("div", { class: "buttons" }, chosen, h("button", { type: "button", click: () => append({ name: chosen.value, options: {} }) }, "Add"));
  };
  const list = rows(heading, about, entries, makeRow, chooser, changed);
  const read = () => {
    const answers = list.read();
    return { value: answers.map(({ value }) => value), wrong: answers.flatMap(({ wrong }) => wrong) };
  };
  return { node: list.node, read };
}

// LoRA adapters. `properties`: the fields of an adapter that a new run may set.
export function adapterRows(heading, about, properties, adapters, changed) {
  const named = { name: { type: "string", description: "Name of the adapter." }, ...properties };
  const makeRow = ([name, entry], number) => {
    const fields = fieldsOf(`adapters.${number}`, named, { ...entry, name }, changed);
    const read = () => {
      const { values, wrong } = valuesOf(fields, { ...entry, name });
      const { name: now, ...rest } = values;
      return { value: [now, { ...entry, ...rest }], wrong };
    };
    return { label: `adapter ${number + 1}`, nodes: [h("div", { class: "grid" }, fields.map(({ node }) => node))], read };
  };
  const chooser = (append) => h("div", { class: "buttons" }, h("button", { type: "button", click: () => append(["", { groups_per_batch: 1 }]) }, "Add an adapter"));
  const list = rows(heading, about, Object.entries(adapters), makeRow, chooser, changed);
  const read = () => {
    const answers = list.read();
    const names = answers.map(({ value: [name] }) => name);
    const twice = names.filter((name, place) => name && names.indexOf(name) !== place);
    return { value: Object.fromEntries(answers.map(({ value }) => value)), wrong: [...answers.flatMap(({ wrong }) => wrong), ...twice.map((name) => `the adapter ${name}, which is there twice,`)] };
  };
  return { node: list.node, read };
}
