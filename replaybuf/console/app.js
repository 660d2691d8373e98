// The console: finds the view of an address, asks it to refresh, and says when the server does not answer.

import { NoAnswer, Problem, clock, token } from "./api.js";
import { closeDialog, dialog, h, update, visible } from "./dom.js";
import { age } from "./format.js";
import { openActions } from "./views/actions.js";
import { openCompare } from "./views/compare.js";
import { openGroup } from "./views/group.js";
import { openLedger } from "./views/ledger.js";
import { openNewRun } from "./views/new_run.js";
import { openProblems } from "./views/problems.js";
import { openRollouts } from "./views/rollouts.js";
import { openRun } from "./views/run.js";
import { openRuns } from "./views/runs.js";
import { openStep } from "./views/step.js";

const RETRY_MS = 2000;
// Answers to a page of a thing that is not for this token, does not exist, or was deleted.
const ABSENT = [403, 404, 410];
// A difference of clocks that a person should know of.
const CLOCK_S = 60;
const ROUTES = [
  [/^\/?$/, openRuns],
  [/^\/new$/, openNewRun],
  [/^\/compare$/, openCompare],
  [/^\/runs\/([^/]+)$/, openRun],
  [/^\/runs\/([^/]+)\/rollouts$/, openRollouts],
  [/^\/runs\/([^/]+)\/groups\/(.+)$/, openGroup],
  [/^\/runs\/([^/]+)\/ledger$/, openLedger],
  [/^\/runs\/([^/]+)\/steps\/([0-9]+)$/, openStep],
  [/^\/runs\/([^/]+)\/problems$/, openProblems],
  [/^\/runs\/([^/]+)\/act$/, openActions],
];

const main = document.getElementById("main");
const banner = document.getElementById("banner");
let view = null;
let timer = 0;
let silentSince = null;
let asking = false;

// A screen reader reads the new page, and the keyboard goes on at its start.
function openNext() {
  openView();
  if (location.hash.startsWith("#/")) main.focus();
}

function openView() {
  const hash = location.hash || "#/";
  if (!hash.startsWith("#/")) return; // the link that skips to the content
  clearTimeout(timer);
  view?.close?.();
  closeDialog();
  const [path, search = ""] = hash.slice(1).split("?");
  const [open, names] = findView(path);
  if (open) {
    view = open({ query: new URLSearchParams(search), refreshNow }, ...names);
  } else {
    view = { title: "Not found", crumbs: [], node: h("div", {}, h("h1", {}, "Not found"), h("p", { class: "empty" }, "This address has no page. ", h("a", { href: "#/" }, "All runs"))) };
  }
  document.title = visible(`${view.title} · replaybuf`);
  document.getElementById("crumbs").replaceChildren(...crumbs(view.crumbs));
  main.replaceChildren(view.node);
  main.removeAttribute("data-old");
  refresh(view);
}

// The view of a path and the names in it; none for an address that nothing made.
function findView(path) {
  const [match, open] = ROUTES.map(([pattern, view]) => [path.match(pattern), view]).find(([match]) => match) ?? [];
  try {
    return [open, match?.slice(1).map(decodeURIComponent)];
  } catch {
    return []; // a part of the address is cut
  }
}

function crumbs(parts) {
  return parts.map(([name, href]) => (href ? h("a", { href }, name) : h("span", { "aria-current": "page" }, name)));
}

async function refresh(shown) {
  if (!shown.refresh || document.hidden) return;
  const begun = performance.now();
  let next = shown.period_ms;
  try {
    await shown.refresh();
    if (shown === view) heard();
  } catch (error) {
    if (shown !== view) return;
    next = RETRY_MS;
    if (error instanceof NoAnswer) silent();
    else if (error instanceof Problem && error.status === 401) await login(error.message);
    else if (error instanceof Problem && ABSENT.includes(error.status)) showAbsent(error);
    else report(error);
  }
  if (shown !== view || !next) return;
  clearTimeout(timer);
  // A slow server gets more time between two questions.
  timer = setTimeout(() => refresh(shown), Math.max(next, 5 * Math.min(6000, performance.now() - begun)));
}

function refreshNow() {
  clearTimeout(timer);
  return refresh(view);
}

function heard() {
  silentSince = null;
  if (!banner.hidden) banner.hidden = true;
  if (main.firstChild !== view.node) main.replaceChildren(view.node);
  main.removeAttribute("data-old");
  const ahead = clock.aheadS();
  update(document.getElementById("clock"), Math.abs(ahead) < CLOCK_S ? "" : `This browser's clock is ${age(Math.abs(ahead))} ${ahead > 0 ? "ahead of" : "behind"} the server's. Ages and times are the server's.`);
}

function silent() {
  silentSince ??= new Date();
  update(banner, `The server has not answered since ${silentSince.toLocaleTimeString("sv")}. The page shows what was last known and asks again every 2 s.`);
  banner.hidden = false;
  main.setAttribute("data-old", "");
}

// Show why there is nothing to see, and where to go, instead of a page without data. The page comes back with an answer.
function showAbsent(error) {
  silentSince = null;
  banner.hidden = true;
  main.removeAttribute("data-old");
  const why = explainAbsent(error);
  if (main.firstChild?.dataset.absent === why) return; // a screen reader reads it once
  const links = [...view.crumbs.filter(([, href]) => href), ["create a run", "#/new"]];
  const ways = links.flatMap(([name, href], place) => [place ? " · " : "Go to: ", h("a", { href }, name)]);
  const hint = error.status === 403 && h("p", {}, "The button Token changes the token of this tab.");
  main.replaceChildren(h("div", { "data-absent": why }, h("h1", {}, view.title), h("div", { class: "empty", role: "alert" }, h("p", { class: "bad" }, why), hint, h("p", {}, ways))));
}

// The service names a call that creates a missing run; here a link does it.
function explainAbsent({ message, document: { name, value, bound } }) {
  return name === "run" && Array.isArray(bound) ? `The run '${value}' does not exist. Runs here: ${bound.join(", ") || "none"}.` : message;
}

function report(error) {
  update(banner, error instanceof Problem ? error.message : `This page failed: ${error.message}. Load it again.`);
  banner.hidden = false;
  if (!(error instanceof Problem)) console.error(error);
}

async function login(why = "") {
  if (asking) return;
  asking = true;
  const entered = await dialog("Token", (close) => {
    const field = h("input", { type: "password", id: "token-field", autocomplete: "off", spellcheck: "false" });
    const submit = (event) => {
      event.preventDefault();
      close(field.value.trim());
    };
    return [
      h("p", {}, "The service asks for a token. A reader token shows everything; an operator token may also change runs."),
      why && h("p", { class: "quiet" }, why),
      h(
        "form",
        { submit },
        h("label", { for: "token-field" }, "Token"),
        field,
        h("p", { class: "quiet" }, "Make one with: ", h("code", {}, "replaybuf token new --role reader --name NAME --tokens-file FILE"), ". It stays in this tab until you close it."),
        h("div", { class: "buttons" }, h("button", { type: "submit", class: "main" }, "Use token"), h("button", { type: "button", click: () => close("") }, "Forget token")),
      ),
    ].filter(Boolean);
  });
  asking = false;
  if (entered !== null) token.set(entered);
  refreshNow();
}

function switchTheme() {
  const dark = getComputedStyle(document.documentElement).getPropertyValue("--theme").trim() === "dark";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("replaybuf-theme", document.documentElement.dataset.theme);
  view?.repaint?.();
}

const theme = localStorage.getItem("replaybuf-theme");
if (theme) document.documentElement.dataset.theme = theme;
document.getElementById("theme").addEventListener("click", switchTheme);
document.getElementById("token").addEventListener("click", () => login());
addEventListener("hashchange", openNext);
document.addEventListener("visibilitychange", () => !document.hidden && refreshNow());
openView();
