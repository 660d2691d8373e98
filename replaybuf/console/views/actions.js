// What an operator can do to a run. Every action is confirmed, and the service records it in the ledger.

import { call, get, runPath } from "../api.js";
import { dialog, h, pill, update } from "../dom.js";
import { counted } from "../format.js";
import { runView } from "./frame.js";

// Parts of the configuration that a live run can change.
const CHANGEABLE = ["strategy", "filters", "limits"];

export function openActions({ refreshNow }, run) {
  const result = h("p", { role: "status" });
  const editor = h("textarea", { id: "change", spellcheck: "false" });
  const older = h("p", { class: "warn", role: "status" });
  const [resume, pause] = [button("Resume", () => change({ state: "running" }, "Resume the run", "Producers get tickets again and trainers get batches.")), button("Pause", () => change({ state: "paused" }, "Pause the run", "Producers get no tickets and trainers no batches until you resume it. Nothing is lost."))];
  const finish = button("Finish", () => change({ state: "finished" }, "Finish the run", "Trainers get the answer that the run is finished. Only a trainer that attaches at an earlier step could continue it.", { danger: true }), "danger");
  const purge = button("Purge dead letters", purgeLetters, "danger");
  const remove = button("Delete the run", removeRun, "danger");
  const view = runView(
    run,
    "Act",
    [
      h("p", { class: "quiet" }, "These actions need a token with the role operator, where the service has tokens."),
      result,
      h("section", { class: "card" }, h("h2", {}, "State"), h("div", { class: "buttons" }, resume, pause, finish)),
      h("section", { class: "card" }, h("h2", {}, "Strategy, filters and limits"), h("label", { for: "change" }, "Edit the values. Only what you change is sent, and you see the difference first."), editor, older, h("div", { class: "buttons" }, button("Preview the change", preview, "main"), button("Read again", () => load()))),
      h("section", { class: "card" }, h("h2", {}, "Remove"), h("p", {}, "The one deletes the bytes of dead letters, the other the run with all its groups. Neither can be undone."), h("div", { class: "buttons" }, purge, remove)),
    ],
    { refresh, period_ms: 3000 },
  );
  let config = null;
  // Revisions of the run: of the values in the editor, and of the state that the page shows.
  let [edited, shown] = [0, 0];

  async function refresh() {
    const status = await get(runPath(run));
    view.state.replaceChildren(pill(status.state));
    [resume.disabled, pause.disabled] = [status.state !== "paused", status.state !== "running"];
    [finish.disabled, remove.disabled, purge.disabled] = [status.state === "finished", status.state !== "finished", status.groups.dead_lettered === 0];
    shown = status.revision;
    if (!config) show(status);
    else if (shown !== edited && !older.textContent) update(older, `The run was changed after you read these values: ${await changesSince(edited)}. Read again before you change them.`);
  }

  async function load() {
    show(await get(runPath(run)));
  }

  function show({ config: found, revision }) {
    [config, edited, older.textContent] = [found, revision, ""];
    editor.value = JSON.stringify(Object.fromEntries(CHANGEABLE.map((name) => [name, found[name]])), null, 2);
  }

  async function preview() {
    const changed = readChange();
    if (!changed) return;
    const answer = await attempt(() => call("PATCH", runPath(run), { body: changed, query: { dry_run: "true", if_revision: edited } }));
    if (!answer) return;
    const lines = differences(config, answer.config);
    if (!lines.length) return say("The service would change nothing: the values are the same.");
    const text = h("pre", { class: "change" }, lines.join("\n"));
    await change(changed, "Change the run", "The change holds from the next batch that is not assembled yet. Groups that the new values forbid are evicted.", { more: text, revision: edited });
  }

  function readChange() {
    let edited;
    try {
      edited = JSON.parse(editor.value);
    } catch (error) {
      return say(`The text is not JSON: ${error.message}`, true);
    }
    const changed = Object.entries(edited).filter(([name, value]) => JSON.stringify(value) !== JSON.stringify(config[name]));
    return changed.length ? Object.fromEntries(changed) : say("Nothing is changed in the text.");
  }

  // The change holds only for the state that the operator saw when the dialog opened.
  async function change(body, title, effect, { more = null, revision = shown, danger = false } = {}) {
    if (!(await confirm(title, effect, { more, danger }))) return;
    const answer = await attempt(() => call("PATCH", runPath(run), { body, query: { if_revision: revision } }));
    if (answer) {
      say(`${title}: done.`);
      if (revision === edited) show(answer);
    }
    refreshNow();
  }

  async function changesSince(revision) {
    const { changes } = await get(runPath(run, "/history"), { points: 1 });
    const newer = changes.filter((one) => one.entry > revision);
    return newer.map((one) => one.lines.join(", ") + (one.by ? ` by ${one.by}` : "")).join("; ") || "unknown";
  }

  async function purgeLetters() {
    if (!(await confirm("Purge dead letters", "Their bytes are deleted. The ledger keeps that they existed.", { danger: true }))) return;
    const answer = await attempt(() => call("DELETE", runPath(run, "/dead-letters")));
    if (answer) say(`Purged ${counted(answer.purged, "dead letter")}.`);
  }

  async function removeRun() {
    if (!(await confirm("Delete the run", `All groups and the ledger of ${run} are deleted. Type the name of the run to confirm.`, { word: run, danger: true }))) return;
    if ((await attempt(() => call("DELETE", runPath(run)))) !== undefined) location.hash = "#/";
  }

  async function attempt(action) {
    try {
      return await action();
    } catch (error) {
      say(error.message, true);
      return undefined;
    }
  }

  function say(text, bad = false) {
    update(result, text);
    result.className = bad ? "bad" : "good";
    result.scrollIntoView({ block: "nearest" });
    return null;
  }

  return view;
}

function button(name, click, kind = "") {
  return h("button", { type: "button", class: kind, click }, name);
}

function confirm(title, effect, { more = null, word = "", danger = false } = {}) {
  return dialog(title, (close) => {
    const yes = h("button", { type: "submit", class: danger ? "main danger" : "main", disabled: Boolean(word) }, title);
    const field = word && h("input", { "aria-label": "Name of the run", autocomplete: "off", input: (event) => (yes.disabled = event.target.value !== word) });
    const submit = (event) => {
      event.preventDefault();
      close(true);
    };
    return [h("p", {}, effect), h("form", { submit }, more ?? "", field || "", h("div", { class: "buttons" }, yes, h("button", { type: "button", click: () => close(null) }, "Cancel")))];
  });
}

// Lines "name: old → new" for every value that differs.
export function differences(before, after, path = "") {
  const names = [...new Set([...Object.keys(before ?? {}), ...Object.keys(after ?? {})])];
  return names.flatMap((name) => {
    const [old, now] = [before?.[name], after?.[name]];
    if (JSON.stringify(old) === JSON.stringify(now)) return [];
    const place = path ? `${path}.${name}` : name;
    const inner = [old, now].every((value) => value && typeof value === "object" && !Array.isArray(value));
    return inner ? differences(old, now, place) : [`${place}: ${JSON.stringify(old) ?? "absent"} → ${JSON.stringify(now) ?? "absent"}`];
  });
}
