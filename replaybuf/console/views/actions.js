// What an operator can do to a run. Every action is confirmed, and the service records it in the ledger.

import { call, get, runPath } from "../api.js";
import { configForm, loadSchemas } from "../config_form.js";
import { dialog, h, pill, update } from "../dom.js";
import { counted } from "../format.js";
import { runView } from "./frame.js";

// Parts of the configuration that a live run can change.
const CHANGEABLE = ["strategy", "filters", "limits", "batch", "on_stale", "max_reissues"];
// After the last key the page asks the service what the change would do.
const PAUSE_MS = 400;

export function openActions({ refreshNow }, run) {
  const result = h("p", { role: "status" });
  const place = h("div", { class: "quiet" }, "Reading the configuration …");
  const foreseen = h("div", { role: "status", "aria-label": "Effect of the change" });
  const older = h("p", { class: "warn", role: "status" });
  const [resume, pause] = [button("Resume", () => change({ state: "running" }, "Resume the run", "Producers get tickets again and trainers get batches.")), button("Pause", () => change({ state: "paused" }, "Pause the run", "Producers get no tickets and trainers no batches until you resume it. Nothing is lost."))];
  const finish = button("Finish", () => change({ state: "finished" }, "Finish the run", "Trainers get the answer that the run is finished. Only a trainer that attaches at an earlier step could continue it.", { danger: true }), "danger");
  const purge = button("Purge dead letters", purgeLetters, "danger");
  const remove = button("Delete the run", removeRun, "danger");
  const lost = h("p", { class: "bad" });
  const loss = h("section", { class: "card", hidden: true }, h("h2", {}, "Redis lost data"), lost, h("div", { class: "buttons" }, button("Go on without it", acceptLoss, "danger")));
  const [whyState, whyRemove] = [h("span", { class: "why" }), h("span", { class: "why" })];
  const view = runView(
    run,
    "Act",
    [
      h("p", { class: "quiet" }, "If the service has tokens, these actions need one with the role operator."),
      result,
      loss,
      h("section", { class: "card" }, h("h2", {}, "State"), h("div", { class: "buttons" }, resume, pause, finish, whyState)),
      h("section", { class: "card" }, h("h2", {}, "Strategy, batch, limits and filters"), h("p", { class: "quiet" }, "The page sends only what you change."), place, foreseen, older, h("div", { class: "buttons" }, button("Preview the change", preview, "main"), button("Read again", () => load()))),
      h("section", { class: "card" }, h("h2", {}, "Remove"), h("p", {}, "Purge deletes the bytes of dead letters. Delete removes the run with all its groups. Neither can be undone."), h("div", { class: "buttons" }, purge, remove, whyRemove)),
    ],
    { refresh, period_ms: 3000 },
  );
  let [config, editor, timer, missing] = [null, null, 0, null];
  // Revisions of the run: of the values in the editor, and of the state that the page shows.
  let [edited, shown] = [0, 0];

  async function refresh() {
    const status = await get(runPath(run)).catch(showLoss);
    loss.hidden = Boolean(status);
    if (!status) return;
    view.state.replaceChildren(pill(status.state));
    [resume.disabled, pause.disabled] = [status.state !== "paused", status.state !== "running"];
    [finish.disabled, remove.disabled, purge.disabled] = [status.state === "finished", status.state !== "finished", status.groups.dead_lettered === 0];
    update(whyState, { running: "It runs already, so there is nothing to resume.", paused: "It is paused already.", finished: "The run is finished." }[status.state]);
    update(whyRemove, [status.groups.dead_lettered === 0 ? "There are no dead letters." : "", status.state === "finished" ? "" : "Finish the run before you delete it."].filter(Boolean).join(" "));
    shown = status.revision;
    if (!config) await show(status);
    else if (shown !== edited && !older.textContent) update(older, `The run was changed after you read these values: ${await changesSince(edited)}. Read again before you change them.`);
  }

  // What Redis lost stops the run: nothing else can be done to it then.
  function showLoss(error) {
    if (error.document?.entries === undefined) throw error;
    missing = { entries: error.document.entries, groups: error.document.groups };
    update(lost, error.message);
    for (const action of [resume, pause, finish, purge, remove]) action.disabled = true;
    return null;
  }

  async function acceptLoss() {
    const gone = `${counted(missing.entries, "ledger entry", "ledger entries")} and ${counted(missing.groups, "group")}`;
    if (!(await confirm("Go on without it", `${gone} of ${run} are gone for good, and every trainer has to attach again. Type the name of the run to confirm.`, { word: run, danger: true }))) return;
    if (await attempt(() => call("POST", runPath(run, "/accept-loss"), { body: missing }))) say(`The run goes on without ${gone}.`);
    refreshNow();
  }

  async function load() {
    await show(await get(runPath(run)));
  }

  async function show({ config: stored, revision }) {
    const known = await loadSchemas();
    [config, edited, older.textContent] = [stored, revision, ""];
    const values = Object.fromEntries(CHANGEABLE.map((name) => [name, stored[name]]));
    const budgets = Object.keys(known.schemas.BatchChange.properties); // other fields of a batch are fixed
    values.batch = Object.fromEntries(budgets.map((name) => [name, stored.batch[name]]));
    if (editor) return editor.set(values);
    const parts = [["Batch", "batch", false, budgets], ["Limits", "limits", true], ["Groups that are too stale", "", false, ["on_stale", "max_reissues"]], ["Filters", "filters"]];
    editor = configForm(known, parts, values, { id: "change", label: "Change of the run", changed: () => (clearTimeout(timer), (timer = setTimeout(foresee, PAUSE_MS))) });
    place.replaceWith(editor.node);
  }

  // What the change would do, while it is typed.
  async function foresee() {
    const changed = readChange();
    if (!changed) return update(foreseen);
    try {
      const lines = differences(config, (await ask(changed)).config);
      update(foreseen, h("pre", { class: "change" }, lines.join("\n") || "It changes nothing."));
    } catch (error) {
      update(foreseen);
      if (error.document?.name === "if_revision") return; // the page says already that somebody else changed the run
      if (error.document) editor.blame(error.document);
      else say(error.message, true);
    }
  }

  const ask = (body) => call("PATCH", runPath(run), { body, query: { dry_run: "true", if_revision: edited } });

  async function preview() {
    clearTimeout(timer);
    const changed = readChange();
    if (!changed) return changed === null && say("You have changed nothing.");
    const answer = await attempt(() => ask(changed));
    if (!answer) return;
    const lines = differences(config, answer.config);
    if (!lines.length) return say("The service would change nothing: the values are the same.");
    const text = h("pre", { class: "change" }, lines.join("\n"));
    await change(changed, "Change the run", "The change applies to batches that the service has not assembled yet. The service evicts groups that the new values forbid.", { more: text, revision: edited });
  }

  // The parts that differ; null if none does, undefined if a field is wrong.
  function readChange() {
    const now = editor?.read();
    if (!now) return undefined;
    const changed = Object.entries(now).filter(([name, value]) => JSON.stringify(value) !== JSON.stringify(editor.started()[name]));
    return changed.length ? Object.fromEntries(changed) : null;
  }

  // The change holds only for the state that the operator saw when the dialog opened.
  async function change(body, title, effect, { more = null, revision = shown, danger = false } = {}) {
    if (!(await confirm(title, effect, { more, danger }))) return;
    const answer = await attempt(() => call("PATCH", runPath(run), { body, query: { if_revision: revision } }));
    if (answer) {
      say(`${title}: done.`);
      update(foreseen);
      if (revision === edited) await show(answer);
    }
    refreshNow();
  }

  async function changesSince(revision) {
    const { changes } = await get(runPath(run, "/history"), { points: 1 });
    const newer = changes.filter((change) => change.entry > revision);
    return newer.map((change) => change.lines.join(", ") + (change.by ? ` by ${change.by}` : "")).join("; ") || "unknown";
  }

  async function purgeLetters() {
    if (!(await confirm("Purge dead letters", "The service deletes their bytes. The ledger still names them.", { danger: true }))) return;
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
