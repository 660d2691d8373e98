// Numbers, times and reasons as people read them.

import { REASONS } from "./wait_reasons.js"; // written by the service: terminal and console say the same

const SCALES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export function count(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, letter] of SCALES) {
    if (Math.abs(value) >= size * 10) return `${(value / size).toFixed(1)}${letter}`;
  }
  return Math.round(value).toLocaleString("en");
}

// A number with its noun: "1 group", "2 groups"; `many` where the plural takes more than an "s".
export function counted(value, noun, many = `${noun}s`) {
  return `${count(value)} ${value === 1 ? noun : many}`;
}

export function decimal(value, digits = 3) {
  return value === null || value === undefined ? "–" : Number(value).toFixed(digits);
}

export function rate(value, unit) {
  if (!value) return `0 ${unit}`;
  return `${value >= 100 ? count(value) : value.toPrecision(2)} ${unit}`;
}

// Seconds as an age: "4 s", "3 min", "2.5 h", "6 d".
export function age(seconds) {
  if (seconds === null || seconds === undefined) return "never";
  if (seconds < 90) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 129600 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} d`;
}

export function clockTime(at_s) {
  return at_s ? new Date(at_s * 1000).toLocaleString("sv") : "–";
}

// Of today the time alone; else day and minute.
export function shortTime(at_s) {
  const [day, time] = clockTime(at_s).split(" ");
  return day === clockTime(Date.now() / 1000).split(" ")[0] ? time : `${day} ${time?.slice(0, 5) ?? ""}`;
}

export function bytes(value) {
  return value === null || value === undefined ? "–" : `${count(value)}B`;
}

const LONGEST_TEXT = 20000;

// The start of a long text, with a note about what is left out.
export function shorten(text, most = LONGEST_TEXT) {
  return text.length <= most ? text : `${text.slice(0, most)} … (${counted(text.length - most, "more character")})`;
}

// Why a run waits: what the reason means, and what a person can do.
export function explainReason(reason) {
  return REASONS[reason] ?? [`The run waits: ${reason}.`, "The documentation of the HTTP calls explains this reason."];
}
