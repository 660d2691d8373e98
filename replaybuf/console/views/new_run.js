// Create a run.

import { call, runPath } from "../api.js";
import { h, update } from "../dom.js";
import { runLink } from "./frame.js";

const START = { strategy: { name: "one-step-off-policy", options: { max_staleness: 1 } }, batch: { groups_per_batch: 16, seq_len: 4096 }, group_size: 8, steps_per_publish: 1 };

export function openNewRun() {
  const name = h("input", { id: "name", autocomplete: "off", spellcheck: "false", pattern: "[a-z0-9][a-z0-9._\\-]{0,62}", required: true });
  const config = h("textarea", { id: "config", spellcheck: "false" });
  const result = h("p", { role: "status", class: "bad" });
  config.value = JSON.stringify(START, null, 2);

  async function submit(event) {
    event.preventDefault();
    try {
      await call("PUT", runPath(name.value), { body: JSON.parse(config.value) });
      location.hash = runLink(name.value);
    } catch (error) {
      update(result, error.message);
    }
  }

  const form = h(
    "form",
    { submit, class: "card" },
    h("label", { for: "name" }, "Name: lower-case letters, digits, dot, dash, underscore"),
    name,
    h("p", {}),
    h("label", { for: "config" }, "Configuration; absent fields take their defaults"),
    config,
    result,
    h("div", { class: "buttons" }, h("button", { type: "submit", class: "main" }, "Create the run"), h("a", { class: "button", href: "#/" }, "Cancel")),
  );
  return { title: "Create a run", crumbs: [["runs", "#/"], ["new", null]], node: h("div", {}, h("h1", {}, "Create a run"), form) };
}
