// Create a run.

import { call, runPath } from "../api.js";
import { configForm, loadSchemas } from "../config_form.js";
import { h, update } from "../dom.js";
import { runLink } from "./frame.js";

const START = { strategy: { name: "one-step-off-policy", options: { max_staleness: 1 } }, batch: { groups_per_batch: 16, seq_len: 4096 }, group_size: 8, steps_per_publish: 1 };
const RUN = ["group_size", "min_group_size", "max_steps", "steps_per_publish", "advantage", "stale_token_mask", "vocab_size", "seed"];
const NAME = "1 to 63 lower-case letters, digits, dots, dashes and underscores; the first is a letter or a digit.";
const PARTS = [
  ["Batch", "batch", true],
  ["Groups and steps", "", true, RUN],
  ["Groups that are too stale", "", false, ["on_stale", "max_reissues"]],
  ["Tickets", "tickets", false],
  ["Limits", "limits", false],
  ["Samples", "history", false],
  ["Filters", "filters"],
  ["Admissions", "admissions"],
  ["LoRA adapters", "adapters"],
  ["Spill", "spill", false],
];

export function openNewRun() {
  const name = h("input", { id: "name", autocomplete: "off", spellcheck: "false", pattern: "[a-z0-9][a-z0-9._\\-]{0,62}", maxlength: 63, title: NAME, required: true, "aria-describedby": "name-hint" });
  const result = h("p", { role: "status", class: "bad" });
  const place = h("div", { class: "quiet" }, "Reading the fields of a configuration …");
  let config = null;
  const ready = loadSchemas().then(
    (known) => {
      config = configForm(known, PARTS, START, { id: "config", label: "Configuration" });
      place.replaceWith(config.node);
    },
    (error) => update(result, error.message),
  );

  async function submit(event) {
    event.preventDefault();
    update(result, "");
    await ready; // a quick click waits for the form
    const body = config?.read();
    if (!body) return;
    try {
      await call("PUT", runPath(name.value), { body });
      location.hash = runLink(name.value);
    } catch (error) {
      if (error.document?.name) config.blame(error.document);
      else update(result, error.message);
    }
  }

  const form = h(
    "form",
    { submit, class: "card" },
    h("div", { class: "field" }, h("label", { for: "name" }, "Name of the run"), name, h("span", { class: "hint", id: "name-hint" }, NAME)),
    place,
    result,
    h("div", { class: "buttons" }, h("button", { type: "submit", class: "main" }, "Create the run"), h("a", { class: "button", href: "#/" }, "Cancel")),
  );
  return { title: "Create a run", crumbs: [["runs", "#/"], ["new", null]], node: h("div", {}, h("h1", {}, "Create a run"), form) };
}
