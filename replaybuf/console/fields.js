// Fields of a form from a JSON Schema: each has its description, its bounds, and says itself what is wrong with it.

import { h, update } from "./dom.js";

const LARGEST_INTEGER = 2 ** 53 - 1;
const NUMBERS = new Set(["integer", "number"]);

// What a schema takes: one type with its bounds, or "json" for everything else; `empty` is what an empty field means.
function kindOf(schema) {
  const kinds = (schema.anyOf ?? [schema]).flatMap((kind) => kind.anyOf ?? [kind]).map((kind) => (kind.$ref ? { type: "object" } : kind));
  const rest = kinds.filter((kind) => kind.type !== "null");
  const empty = rest.length < kinds.length ? null : "default" in schema ? schema.default : undefined;
  const number = rest.find((kind) => NUMBERS.has(kind.type));
  if (rest.length > 1 || !(rest[0].enum || ["boolean", "string", ...NUMBERS].includes(rest[0].type))) return { type: "json", number, words: rest.flatMap((kind) => kind.enum ?? []), empty };
  return { ...rest[0], type: rest[0].enum ? "enum" : rest[0].type, empty };
}

const show = (bound) => bound.toLocaleString("en");

function boundsOf({ minimum, exclusiveMinimum, maximum, exclusiveMaximum }) {
  const low = exclusiveMinimum !== undefined ? `above ${show(exclusiveMinimum)}` : minimum !== undefined && minimum > -1e9 ? `${show(minimum)} or more` : "";
  const high = exclusiveMaximum !== undefined ? `below ${show(exclusiveMaximum)}` : maximum !== undefined && maximum < 1e9 && maximum < LARGEST_INTEGER ? `at most ${show(maximum)}` : "";
  const closed = low && high && exclusiveMinimum === undefined && exclusiveMaximum === undefined;
  return closed ? `${show(minimum)} to ${show(maximum)}` : [low, high].filter(Boolean).join(", ");
}

// Read the text of a field: { value } or { problem }.
function parse(kind, text) {
  if (text === "") return kind.empty === undefined && kind.type !== "boolean" ? { problem: "This field needs a value." } : { value: kind.empty };
  if (kind.type === "boolean") return { value: text === "true" };
  if (kind.type === "enum" || kind.type === "string") return { value: text };
  if (NUMBERS.has(kind.type)) return number(kind, text);
  if (kind.words?.includes(text)) return { value: text };
  if (kind.number && !/^[[{"]/.test(text)) return number(kind.number, text);
  try {
    return { value: JSON.parse(text) };
  } catch (error) {
    return { problem: `This is not JSON: ${error.message}` };
  }
}

function number(kind, text) {
  const value = Number(text.replaceAll(/[ ,_]/g, ""));
  const { minimum = -Infinity, exclusiveMinimum = -Infinity, maximum = Infinity, exclusiveMaximum = Infinity } = kind;
  if (!Number.isFinite(value)) return { problem: `This is not a number: ${text}` };
  if (kind.type === "integer" && !Number.isInteger(value)) return { problem: "This must be a whole number." };
  if (value < minimum || value <= exclusiveMinimum || value > maximum || value >= exclusiveMaximum) return { problem: `This must be ${boundsOf(kind)}.` };
  return { value };
}

function textOf(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

// One field: `read()` gives its value and shows what is wrong, `blame(text)` shows what the service found.
export function field(name, schema, value, changed) {
  const kind = kindOf(schema);
  const id = `field-${name}`;
  const problem = h("span", { id: `${id}-problem`, class: "bad" });
  const bounds = boundsOf(kind.number ?? kind);
  const hints = [schema.description, bounds && `Values: ${bounds}.`, kind.empty === null && "Empty: not set."].filter(Boolean);
  const attributes = { id, name, autocomplete: "off", spellcheck: "false", "aria-describedby": `${id}-hint ${id}-problem` };
  const choices = kind.type === "boolean" ? ["false", "true"] : (kind.enum ?? null);
  const listen = () => {
    read();
    changed();
  };
  const input = choices
    ? h("select", { ...attributes, change: listen }, [...("default" in schema ? [] : [""]), ...choices].map((choice) => h("option", { value: choice }, choice || "not set")))
    : h("input", { ...attributes, inputmode: NUMBERS.has(kind.type) ? "decimal" : null, input: listen });
  input.value = textOf(value);

  function blame(text) {
    update(problem, text);
    if (text) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  }

  function read() {
    const { value: now, problem: wrong } = parse(kind, input.value.trim());
    blame(wrong ?? "");
    return { value: now, wrong: Boolean(wrong) };
  }

  const label = h("label", { for: id }, name.split(".").at(-1));
  return { name, node: h("div", { class: "field" }, label, input, h("span", { id: `${id}-hint`, class: "hint" }, hints.join(" ")), problem), read, blame };
}
