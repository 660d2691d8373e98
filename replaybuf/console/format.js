// Numbers, times and reasons as people read them.

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
const REASONS = {
  finished: ["The run is finished.", "You can leave it as it is. To free its memory and its name, delete it on its page Act."],
  paused: ["The run is paused.", "Read the reason, then resume the run on its page Act."],
  awaiting_ack: ["The trainer has a batch and did not ack it yet.", "Check that the trainer is alive and how long its step takes."],
  awaiting_publication: ["The trainer did not publish the version that the next batch needs.", "Check that the trainer loads its weights into the engines and then publishes."],
  rate_limited: ["The buffer is full.", "The trainer must take batches, or you raise the limits of the run."],
  all_stale: ["Every group became too stale.", "Producers sample with old weights. Check their engines, or allow more staleness (max_staleness)."],
  reuse_exhausted: ["Every group was used as often as allowed.", "Producers must store new groups, or you allow more uses."],
  no_producers: ["No producer asks for tickets.", "Start a producer: replaybuf generate, or your own."],
  no_groups: ["No usable group is stored yet.", "Producers work on their first groups. Look at producers and failed prompts if it lasts."],
  too_few_groups: ["The batch needs more groups.", "Producers are slower than the trainer, or their groups are dropped."],
  too_few_tokens: ["The batch needs more tokens.", "Producers are slower than the trainer, or their groups are dropped."],
  awaiting_columns: ["Groups lack columns that a later stage adds.", "Check that the stage runs: replaybuf stage."],
};

export function explainReason(reason) {
  return REASONS[reason] ?? [`The run waits: ${reason}.`, "The documentation of the HTTP calls explains this reason."];
}
