// Means of the history of a run over some of its steps, and how far two results of an evaluation are apart.

import { count, decimal } from "./format.js";

// Name, column, digits.
export const FIGURES = [["reward", "reward_mean", 3], ["staleness", "staleness", 2], ["seconds per step", "step_s", 2], ["trained tokens/s", "tokens_out_per_s", 0], ["rollout length", "length", 0], ["uses of a group", "uses", 2], ["batch fill", "fill", 2]];

// Mean of a column over the rows at `places`, by their number of steps; null without a value.
export function mean(columns, name, places) {
  const known = places.filter((place) => columns[name][place] !== null);
  const weight = stepsOf(columns, known);
  return weight ? known.reduce((sum, place) => sum + columns[name][place] * columns.steps[place], 0) / weight : null;
}

export const stepsOf = ({ steps }, places) => places.reduce((sum, place) => sum + steps[place], 0);

// How much higher or lower the second result is, and whether that is more than chance.
export function describeDifference(first, second) {
  const difference = second.reward_mean - first.reward_mean;
  const amount = `${decimal(Math.abs(difference))} ${difference < 0 ? "lower" : "higher"}`;
  if (first.standard_error === null || second.standard_error === null) return amount;
  const error = Math.hypot(first.standard_error, second.standard_error);
  return `${amount}, ${Math.abs(difference) < 2 * error ? "within" : "more than"} two standard errors`;
}

export function describeResult({ reward_mean, standard_error, version }) {
  return `${decimal(reward_mean)}${standard_error === null ? "" : ` ± ${decimal(standard_error)}`} at version ${count(version)}`;
}

// Places of the newest rows that have at least so many steps, or of all.
export function newestPlaces({ steps }, wanted) {
  let [place, counted] = [steps.length, 0];
  while (place > 0 && counted < wanted) counted += steps[--place];
  return [...steps.keys()].slice(place);
}
