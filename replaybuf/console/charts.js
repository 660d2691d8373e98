// Charts over steps or time: shared cursor and range, hover values, CSV.

import { h } from "./dom.js";
import { count, counted } from "./format.js";
import uPlot from "./vendor/uPlot.esm.js";

const HEIGHT = 190;

// Title, unit, series as [name, column]; `band`: the first two series are the edges of a band.
export const CHARTS = [
  { title: "Reward", unit: "mean of groups ± spread inside a group", series: [["mean + std", (c) => plus(c, 1)], ["mean − std", (c) => plus(c, -1)], ["mean", (c) => c.reward_mean]], band: true },
  { title: "Reward of groups", unit: "lowest, highest", series: [["highest", (c) => c.reward_max], ["lowest", (c) => c.reward_min]] },
  { title: "Staleness at use", unit: "policy versions", series: [["mean", (c) => c.staleness], ["oldest", (c) => c.staleness_max]] },
  { title: "Tokens per second", unit: "stored, trained", series: [["trained", (c) => c.tokens_out_per_s], ["stored", (c) => c.tokens_in_per_s]] },
  { title: "Rollout length", unit: "tokens", series: [["mean", (c) => c.length], ["longest", (c) => c.longest]] },
  { title: "Time from stored to batch", unit: "seconds", series: [["mean", (c) => c.age_s]] },
  { title: "Seconds per step", unit: "from ack to ack", series: [["step", (c) => c.step_s]] },
  { title: "Uses of a group", unit: "this use counted", series: [["mean", (c) => c.uses]] },
  { title: "Groups per batch", unit: "", series: [["groups", (c) => c.groups]] },
  { title: "Batch fill", unit: "share of the budget", series: [["fill", (c) => c.fill]] },
];

const plus = (columns, sign) => columns.reward_mean.map((mean, place) => mean + sign * columns.reward_std[place]);

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function axis(values) {
  return { stroke: color("--soft"), grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui", size: values ? 52 : 30, values };
}

// A panel with one chart. `onRange(low, high)` is called with the values of a selection, `onPick(value)` with that of a click.
export class Chart {
  constructor(spec, onRange, onPick) {
    this.spec = spec;
    this.onRange = onRange;
    this.onPick = onPick;
    this.marks = [];
    this.plot = null;
    this.data = null;
    this.place = h("div", { role: "img" });
    const save = h("button", { type: "button", "aria-label": `${spec.title} as CSV`, click: () => this.save() }, "CSV");
    this.node = h("section", { class: "chart" }, h("div", { class: "head" }, h("h3", {}, spec.title), h("span", {}, spec.unit), save), this.place);
    this.watch = new ResizeObserver(() => this.plot?.setSize({ width: this.place.clientWidth, height: HEIGHT }));
    this.watch.observe(this.place);
  }

  // Show columns; `x` are steps, or seconds since the epoch if `time`. `marks` are values of x with a vertical line.
  show(x, columns, time, marks = []) {
    this.marks = marks;
    const data = [x, ...this.spec.series.map(([, read]) => read(columns))];
    this.data = data;
    const newest = this.spec.series.map(([name], place) => `${name} ${format(data[place + 1].findLast((value) => value !== undefined))}`);
    this.place.setAttribute("aria-label", `${this.spec.title} over ${counted(x.length, "point")}. Newest: ${newest.join(", ")}.`);
    const lines = [this.spec.x, ...this.spec.series.map(([name]) => name)].join();
    if (this.plot && this.time === time && this.lines === lines) this.plot.setData(data);
    else this.build(data, time);
    this.lines = lines; // uPlot cannot change their number or names
    const { plot } = this;
    queueMicrotask(() => plot.cursor.idx ?? plot.setLegend({ idx: x.length - 1 })); // uPlot empties it after a change of the data
  }

  build(data, time) {
    this.plot?.destroy();
    this.time = time;
    const series = this.spec.series.map(([name], place) => ({
      label: name,
      stroke: color(`--line-${this.spec.band ? (place === 2 ? 1 : 6) : (place % 6) + 1}`),
      width: this.spec.band && place < 2 ? 0.5 : 1.5,
      points: { show: data[0].length < 3, filter: (plot, line) => findLonePoints(plot.data[line]) },
      value: (_, value) => format(value),
    }));
    const options = {
      width: Math.max(200, this.place.clientWidth),
      height: HEIGHT,
      scales: { x: { time, range: (_, low, high) => (low === high ? [low, low + 1] : [low, high]) } },
      axes: [axis(null), axis((_, values) => values.map((value) => (Math.abs(value) >= 10000 ? count(value) : String(+value.toPrecision(4)))))],
      series: [{ label: this.spec.x ?? (time ? "time" : "step"), value: (_, value) => (value === null ? "–" : time ? new Date(value * 1000).toLocaleString("sv") : Number.isInteger(value) ? String(value) : value.toFixed(3)) }, ...series],
      bands: this.spec.band ? [{ series: [1, 2], fill: `${color("--line-1")}22` }] : [],
      cursor: { sync: { key: "console", filters: { pub: (type) => type.startsWith("mousem") || type === "mouseleave" } }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => null } },
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
    for (const mark of this.marks) {
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
    saveCsv(`${this.spec.title}.csv`, [this.spec.x ?? (this.time ? "at_s" : "step"), ...this.spec.series.map(([name]) => name)], this.data);
  }

  repaint() {
    if (this.data) this.build(this.data, this.time);
  }

  close() {
    this.watch.disconnect();
    this.plot?.destroy();
  }
}

// Places of values without a neighbour: no line ends there, so only a point shows them. A line passes over `undefined`,
// which is a step that this run did not make, and breaks at null.
function findLonePoints(values) {
  const places = [...values.keys()].filter((place) => values[place] !== undefined);
  const isValue = (at) => typeof values[places[at]] === "number";
  return places.filter((_, at) => isValue(at) && !isValue(at - 1) && !isValue(at + 1));
}

// Offer columns as a file.
export function saveCsv(name, titles, columns) {
  const lines = [titles.map(quote).join(",")];
  for (let place = 0; place < columns[0].length; place++) lines.push(columns.map((column) => column[place] ?? "").join(","));
  const url = URL.createObjectURL(new Blob([`${lines.join("\n")}\n`], { type: "text/csv" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// A spreadsheet must not take a name for a formula.
const quote = (text) => `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;

const format = (value) => (value === null || value === undefined ? "–" : Math.abs(value) >= 10000 ? count(value) : String(+value.toPrecision(4)));
