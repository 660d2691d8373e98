// Calls of the service, with the token of this browser tab.

const KEY = "replaybuf-token";
const TIMEOUT_MS = 20000;
// A token may make few calls per second: a question waits and is asked again, at most so often and so long each.
const REPEATS = 3;
const LONGEST_WAIT_S = 10;

// An answer that is a problem document.
export class Problem extends Error {
  constructor(status, document) {
    super(document.detail ?? document.title ?? `status ${status}`);
    this.status = status;
    this.document = document;
  }
}

// The server did not answer.
export class NoAnswer extends Error {}

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

// The difference between the clock of this browser and that of the server, from the newest answer that names a time.
let aheadS = 0;
export const clock = { aheadS: () => aheadS };

export const runPath = (run, rest = "") => `/v1/runs/${encodeURIComponent(run)}${rest}`;

export async function call(method, path, options) {
  const text = await callText(method, path, options);
  const answer = text ? JSON.parse(text) : null;
  if (answer?.now_s) aheadS = Date.now() / 1000 - answer.now_s;
  return answer;
}

export async function callText(method, path, { query = {}, body } = {}) {
  const pairs = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const parameters = new URLSearchParams(pairs).toString();
  const headers = {};
  if (token.get()) headers.Authorization = `Bearer ${token.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const address = parameters ? `${path}?${parameters}` : path;
  const request = { method, headers, body: body === undefined ? undefined : JSON.stringify(body) };
  let answer = await ask(address, request);
  for (let repeat = 0; answer.status === 429 && method === "GET" && repeat < REPEATS; repeat++) {
    const wait_s = Math.min(LONGEST_WAIT_S, Number(answer.headers.get("Retry-After")) || 1);
    await new Promise((resolve) => setTimeout(resolve, 1000 * wait_s));
    answer = await ask(address, request);
  }
  const text = await answer.text();
  if (!answer.ok) throw new Problem(answer.status, readProblem(text));
  return text;
}

async function ask(address, request) {
  try {
    return await fetch(address, { ...request, signal: AbortSignal.timeout(TIMEOUT_MS) });
  } catch (error) {
    throw new NoAnswer(String(error.message ?? error));
  }
}

export const get = (path, query) => call("GET", path, { query });

// Like `get`, but null where the service has no such thing.
export async function find(path, query) {
  try {
    return await get(path, query);
  } catch (error) {
    if (error instanceof Problem && [403, 404, 410].includes(error.status)) return null;
    throw error;
  }
}

function readProblem(text) {
  try {
    return JSON.parse(text);
  } catch {
    return { detail: text.slice(0, 500) };
  }
}
