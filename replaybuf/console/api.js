// Calls of the service, with the token of this browser tab.

const KEY = "replaybuf-token";
const TIMEOUT_MS = 20000;

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

export const runPath = (run, rest = "") => `/v1/runs/${encodeURIComponent(run)}${rest}`;

export async function call(method, path, { query = {}, body } = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const parameters = new URLSearchParams(given).toString();
  const headers = {};
  if (token.get()) headers.Authorization = `Bearer ${token.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(parameters ? `${path}?${parameters}` : path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
  } catch (error) {
    throw new NoAnswer(String(error.message ?? error));
  }
  const text = await answer.text();
  if (!answer.ok) throw new Problem(answer.status, readProblem(text));
  return text ? JSON.parse(text) : null;
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
