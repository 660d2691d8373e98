// Charts over steps or time: shared cursor and range, hover values, CSV.

import { h } from "./dom.js";
import { count, counted } from "./format.js";

const { uPlot } = window; // index.html loads it
const HEIGHT = 190;

const SMOOTH_WIDTH = 2;
const LAST_ROWS = 3;
// Distances of marks on an axis of whole numbers.
const WHOLE = [1, 2, 5].flatMap((first) => Array.from({ length: 9 }, (_, power) => first * 10 ** power)).sort((first, second) => first - second);

// Section of the page, title, unit, series as [name, column, place of its colour if another]; `band`: the first two series are the edges of a band.
export const CHARTS = [
  { section: "Learning", title: "Reward", unit: "mean of groups ± spread inside a group", series: [["mean + std", (c) => plus(c, 1)], ["mean − std", (c) => plus(c, -1)], ["mean", (c) => c.reward_mean]], band: true },
  { section: "Learning", title: "Reward of groups", unit: "lowest, highest", series: [["highest", (c) => c.reward_max], ["lowest", (c) => c.reward_min]] },
  { section: "Speed", title: "Tokens per second", unit: "stored, trained", series: [["trained", (c) => c.tokens_out_per_s], ["stored", (c) => c.tokens_in_per_s]] },
  { section: "Speed", title: "Seconds per step", unit: "from ack to ack", series: [["step", (c) => c.step_s]] },
  { section: "Speed", title: "Time from stored to batch", unit: "seconds", series: [["mean", (c) => c.age_s]] },
  { section: "Data", title: "Staleness at use", unit: "policy versions", series: [["mean", (c) => c.staleness], ["oldest", (c) => c.staleness_max]] },
  { section: "Data", title: "Rollout length", unit: "tokens", series: [["mean", (c) => c.length], ["longest", (c) => c.longest]] },
  { section: "Data", title: "Uses of a group", unit: "this use counted", series: [["mean", (c) => c.uses]] },
  { section: "Data", title: "Generated per step", unit: "tokens stored per token trained", series: [["share", (c) => c.tokens_in_per_s.map((stored, place) => (c.tokens_out_per_s[place] ? stored / c.tokens_out_per_s[place] : null))]] },
  { section: "Data", title: "Groups per batch", unit: "", series: [["groups", (c) => c.groups]] },
  { section: "Data", title: "Batch fill", unit: "share of the budget", series: [["fill", (c) => c.fill]] },
];

const plus = (columns, sign) => columns.reward_mean.map((mean, place) => mean + sign * columns.reward_std[place]);

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function axis(values) {
  return { stroke: color("--soft"), grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui", size: values ? 52 : 30, values };
}

// A panel with one chart, or with one line of text where every value is the same. `onRange(low, high)` is called with the
// values of a selection, `onPick(value)` with that of a click.
export class Chart {
  constructor(spec, onRange, onPick) {
    this.spec = spec;
    this.onRange = onRange;
    this.onPick = onPick;
    this.how = {};
    this.plot = null;
    this.data = null;
    this.place = h("div", { role: "img" });
    this.constant = h("p", { class: "constant", hidden: true });
    const save = h("button", { type: "button", "aria-label": `${spec.title} as CSV`, click: () => this.save() }, "CSV");
    this.node = h("section", { class: "chart" }, h("div", { class: "head" }, h("h3", {}, spec.title), h("span", {}, spec.unit), save), this.constant, this.place);
    this.watch = new ResizeObserver(() => this.plot?.setSize({ width: this.place.clientWidth, height: HEIGHT }));
    this.watch.observe(this.place);
  }

  // Show columns; `x` are steps, or seconds since the epoch if `how.time`. `how.marks` are values of x with a vertical line,
  // `how.smooth`: rows that a smoothed line averages over, `how.log`: logarithmic, where all values are above 0.
  show(x, columns, how = {}) {
    this.how = { time: false, marks: [], smooth: 1, log: false, ...how };
    this.data = [x, ...this.spec.series.map(([, read]) => read(columns))];
    const newest = this.spec.series.map(([name], place) => `${name} ${format(this.data[place + 1].findLast((value) => value !== undefined))}`);
    this.place.setAttribute("aria-label", `${this.spec.title} over ${counted(x.length, "point")}. Newest: ${newest.join(", ")}.`);
    const flat = x.length > 1 && this.data.slice(1).every(isConstant);
    [this.constant.hidden, this.place.hidden] = [!flat, flat];
    this.node.classList.toggle("flat", flat);
    this.constant.textContent = flat ? this.spec.series.map(([name], place) => `${name} ${format(this.data[place + 1].find(isNumber))}`).join(", ") : "";
    this.draw(flat);
  }

  draw(flat) {
    const { time, smooth, log } = this.how;
    const data = smooth > 1 ? [...this.data, ...this.smoothed().map((place) => average(this.data[place], smooth))] : this.data;
    const shape = [time, smooth > 1, log && isPositive(data), this.spec.x, ...this.spec.series.map(([name]) => name)].join();
    if (flat) this.plot = this.plot?.destroy() ?? null;
    else if (this.plot && this.shape === shape) this.plot.setData(data);
    else this.build(data);
    this.shape = shape; // uPlot cannot change the number or the names of its lines
    const { plot } = this;
    queueMicrotask(() => plot && (plot.cursor.idx ?? plot.setLegend({ idx: newestRow(data) }))); // uPlot empties it after a change of the data
  }

  // Places of the lines that have a smoothed one: of a band the mean alone.
  smoothed() {
    const places = this.spec.series.map((_, place) => place + 1);
    return this.spec.band ? places.slice(2) : places;
  }

  build(data) {
    this.plot?.destroy();
    const { time, smooth, log } = this.how;
    const thin = smooth > 1;
    const stroke = (place) => color(`--line-${this.spec.band ? (place === 2 ? 1 : 6) : ((this.spec.series[place][2] ?? place) % 6) + 1}`);
    const points = { show: data[0].length < 3, filter: (plot, line) => findLonePoints(plot.data[line]) };
    const value = (_, number) => format(number);
    const series = this.spec.series.map(([label], place) => ({ label, stroke: `${stroke(place)}${thin ? "66" : ""}`, width: this.spec.band && place < 2 ? 0.5 : thin ? 1 : 1.5, points, value }));
    if (thin) series.push(...this.smoothed().map((place) => ({ label: `${this.spec.series[place - 1][0]}, smoothed`, stroke: stroke(place - 1), width: SMOOTH_WIDTH, points, value })));
    const sync = { key: "console", filters: { pub: (type) => type.startsWith("mousem") || type === "mouseleave" } };
    const steps = time ? {} : { incrs: WHOLE };
    const options = {
      width: Math.max(200, this.place.clientWidth),
      height: HEIGHT,
      scales: { x: { time, range: (_, low, high) => (low === high ? [low, low + 1] : [low, high]) }, y: log && isPositive(data) ? { distr: 3 } : {} },
      axes: [{ ...axis(null), ...(this.spec.x === "hours" ? {} : steps) }, axis((_, values) => values.map(mark))],
      series: [{ label: this.spec.x ?? (time ? "time" : "step"), value: (_, value) => (value === null ? "–" : time ? new Date(value * 1000).toLocaleString("sv") : Number.isInteger(value) ? String(value) : value.toFixed(3)) }, ...series],
      bands: this.spec.band ? [{ series: [1, 2], fill: `${color("--line-1")}22` }] : [],
      cursor: { ...(this.spec.alone ? {} : { sync }), drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => null } },
      hooks: { setSelect: [(plot) => this.select(plot)], draw: [(plot) => this.drawMarks(plot)] },
    };
    this.plot = new uPlot(options, data, this.place);
    this.listenToClicks(this.plot.over);
  }

  select(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.onRange(...range);
  }

  // A click ends every drag too: it picks a point only if the mouse did not move.
  listenToClicks(over) {
    let downAt = 0;
    over.addEventListener("mousedown", (event) => (downAt = event.clientX));
    over.addEventListener("click", (event) => {
      const { idx } = this.plot.cursor;
      if (Math.abs(event.clientX - downAt) < 4 && typeof idx === "number") this.onPick(this.plot.data[0][idx]);
    });
  }

  drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = color("--warn");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const mark of this.how.marks) {
      const x = Math.round(plot.valToPos(mark, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  save() {
    if (!this.data) return;
    saveCsv(`${this.spec.title}.csv`, [this.spec.x ?? (this.how.time ? "at_s" : "step"), ...this.spec.series.map(([name]) => name)], this.data);
  }

  repaint() {
    this.shape = "";
    if (this.plot) this.draw(false);
  }

  close() {
    this.watch.disconnect();
    this.plot?.destroy();
  }
}

const isNumber = (value) => typeof value === "number";

// The newest steps lack figures until they are acked: of the last rows the one with the most values.
function newestRow([x, ...lines]) {
  const known = (place) => lines.filter((values) => isNumber(values[place])).length;
  const rows = [...x.keys()].slice(-LAST_ROWS).reverse();
  return rows.reduce((best, place) => (known(place) > known(best) ? place : best), rows[0]);
}

function isConstant(values) {
  const first = values.find(isNumber);
  return values.every((value) => !isNumber(value) || value === first);
}

const isPositive = ([, ...lines]) => lines.every((values) => values.every((value) => !isNumber(value) || value > 0));

// An exponential moving average that forgets half of its weight in about a third of `rows`; missing values stay missing.
function average(values, rows) {
  const share = 2 / (rows + 1);
  let mean = null;
  return values.map((value) => {
    if (!isNumber(value)) return value;
    mean = mean === null ? value : mean + share * (value - mean);
    return mean;
  });
}

// Places of values without a neighbour: no line ends there, so only a point shows them. A line passes over `undefined`,
// which is a step that this run did not make, and breaks at null.
function findLonePoints(values) {
  const places = [...values.keys()].filter((place) => values[place] !== undefined);
  const isValue = (at) => isNumber(values[places[at]]);
  return places.filter((_, at) => isValue(at) && !isValue(at - 1) && !isValue(at + 1));
}

// Offer columns as a file.
export function saveCsv(name, titles, columns) {
  const lines = [titles.map(quote).join(",")];
  for (let place = 0; place < columns[0].length; place++) lines.push(columns.map((column) => column[place] ?? "").join(","));
  saveFile(name, "text/csv", `${lines.join("\n")}\n`);
}

export function saveFile(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// A spreadsheet must not take a name for a formula.
const quote = (text) => `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;

// A value beside an axis, which has room for seven characters.
function mark(value) {
  if (value === null) return "";
  const rounded = +value.toPrecision(4);
  if (rounded !== 0 && Math.abs(rounded) < 0.001) return rounded.toExponential();
  return Math.abs(rounded) >= 10000 ? count(rounded) : String(rounded);
}

const format = (value) => (value === null || value === undefined ? "–" : Math.abs(value) >= 10000 ? count(value) : String(+value.toPrecision(4)));
