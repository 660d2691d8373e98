// Build and update the page. Text from the server becomes text nodes only, never markup.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "polyline", "circle", "title"]);

// Characters that are not seen and change what is seen: controls, and those that turn the direction of text around them.
// Marks and joiners that languages need stay; CSS isolates the direction of each part.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069\ufff9-\ufffb]/g;

export const visible = (text) => text.replace(HIDDEN, (character) => `⟨${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

const childrenOf = (parts) => parts.flat(2).filter((child) => child !== null && child !== undefined && child !== false).map((child) => (typeof child === "string" ? visible(child) : child));

// Make an element: `h("td", { class: "number", title: "..." }, child, ...)`. A function is an event listener.
export function h(tag, attributes = {}, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "width") node.style.width = value; // attributes `style` are against the policy of the page
    else node.setAttribute(name, value === true ? "" : name === "title" ? visible(String(value)) : String(value));
  }
  node.append(...childrenOf(children));
  return node;
}

// Make the children of `parent` equal to `wanted`, and keep elements that do not change: focus and hover stay.
// Only for parts without listeners of their own.
export function update(parent, ...wanted) {
  const next = childrenOf(wanted);
  const now = [...parent.childNodes];
  next.forEach((child, place) => {
    const node = typeof child === "string" ? document.createTextNode(child) : child;
    if (place >= now.length) parent.append(node);
    else morph(now[place], node);
  });
  now.slice(next.length).forEach((node) => node.remove());
}

const TURN_MS = 12;

// Like `update` with what each of `makers` makes, in short turns: a long list does not hold the page. A newer call for
// the same parent ends an older one.
const newest = new WeakMap();
export async function updateInTurns(parent, makers) {
  const call = {};
  newest.set(parent, call);
  let began = performance.now();
  for (const [place, make] of makers.entries()) {
    if (performance.now() - began > TURN_MS) {
      await new Promise((resolve) => setTimeout(resolve));
      if (newest.get(parent) !== call) return;
      began = performance.now();
    }
    const old = parent.childNodes[place];
    if (old) morph(old, make());
    else parent.append(make());
  }
  [...parent.childNodes].slice(makers.length).forEach((node) => node.remove());
}

function morph(old, node) {
  if (old === node) return;
  if (old.nodeType !== node.nodeType || old.nodeName !== node.nodeName) {
    old.replaceWith(node);
  } else if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== node.data) old.data = node.data;
  } else {
    const kept = old.nodeName === "DETAILS" ? "open" : ""; // what a person opened stays open
    for (const { name } of [...old.attributes]) if (name !== kept && !node.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of node.attributes) {
      if (old.getAttribute(name) === value) continue;
      if (name === "style") old.style.cssText = value;
      else old.setAttribute(name, value);
    }
    if ("checked" in old) old.checked = node.checked; // what a person clicked is not in the attribute
    update(old, [...node.childNodes]);
  }
}

// A table with headings; each column is [heading, class, cell of a row].
export function table(caption, columns, rows, empty) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const head = columns.map(([name, kind]) => h("th", { scope: "col", class: kind }, name));
  const body = rows.map((row) => h("tr", {}, columns.map(([name, kind, cell]) => h("td", { class: kind, "data-label": typeof name === "string" ? name : null }, cell(row)))));
  const cards = columns.every(([name]) => typeof name === "string") ? "cards" : null;
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { class: cards }, h("caption", { class: "hidden" }, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)),
  );
}

export function pill(state) {
  return h("span", { class: `pill ${state}` }, state.replaceAll("_", " "));
}

// A list of names and values.
export function facts(pairs) {
  return h(
    "dl",
    { class: "facts" },
    pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}

// A small line of numbers; `label` is for screen readers.
export function sparkline(values, label) {
  if (values.length < 2) return h("span", { class: "spark" }); // a dash would read as the sign of the number behind it
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const y = (value) => 22 - (high > low ? (20 * (value - low)) / (high - low) : 10);
  const points = values.map((value, place) => `${((100 * place) / (values.length - 1)).toFixed(1)},${y(value).toFixed(1)}`);
  const line = h("polyline", { points: points.join(" ") });
  return h("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", role: "img", "aria-label": label }, line);
}

let dialogs = 0;

// Show a dialog and return a promise of what `close(value)` gave; null if it was cancelled.
export function dialog(title, build) {
  const box = document.getElementById("dialog");
  const number = ++dialogs;
  return new Promise((resolve) => {
    const close = (value) => {
      if (number === dialogs && box.open) box.close();
      resolve(value);
    };
    box.replaceChildren(h("h2", { id: "dialog-title" }, title), ...build(close));
    box.onclose = () => resolve(null);
    if (!box.open) box.showModal();
  });
}

// Close the dialog as cancelled: it is about the page that was left.
export function closeDialog() {
  const box = document.getElementById("dialog");
  if (box.open) box.close();
}
