/**
 * Calls to the daemon. The token is sent in the Authorization header only, never in a cookie or an address.
 *
 * It is kept in this tab, until the tab closes, or in this browser where the user has chosen that.
 */
const KEY = "horizon-token";
const BASE = "/horizon/v1";

let token = sessionStorage.getItem(KEY) || localStorage.getItem(KEY) || "";
/** @type {(why: string) => void} */
let onSignedOut = () => {};

/** An answer that is not a success: `violations` are {field, description}, `status` is 0 where none came. */
export class ApiError extends Error {
  constructor(message, { status = 0, reason = "", violations = [] } = {}) {
    super(message);
    this.status = status;
    this.reason = reason;
    this.violations = violations;
  }
}

export const isSignedIn = () => token !== "";

/** Call `handler` with a sentence whenever the token is given up or refused. */
export function whenSignedOut(handler) {
  onSignedOut = handler;
}

/** Keep the token: in this tab, or in the browser where `stay` is set. */
export function signIn(given, stay) {
  token = given;
  (stay ? localStorage : sessionStorage).setItem(KEY, token);
}

/** Forget the token everywhere, and say why. */
export function signOut(why = "") {
  token = "";
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
  forget();
  onSignedOut(why);
}

/**
 * Call the daemon and return its answer; `path` starts after /horizon/v1.
 *
 * @param {string} path
 * @param {{method?: string, body?: any, signal?: AbortSignal, accept?: string}} [options]
 * @returns {Promise<Response>}
 */
export async function call(path, { method = "GET", body, signal, accept = "application/json" } = {}) {
  const asker = token;
  const headers = { Authorization: `Bearer ${asker}`, Accept: accept };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    const sent = body === undefined ? undefined : JSON.stringify(body);
    answer = await fetch(BASE + path, {
      method,
      headers,
      body: sent,
      signal,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The daemon cannot be reached.");
  }
  if (answer.ok) return answer;
  const told = (await answer.json().catch(() => null))?.error;
  const isToken = answer.status === 401;
  const refusal = isToken ? "The daemon does not accept this token." : `The daemon answered ${answer.status}.`;
  const message = told?.message || refusal;
  // An answer may come after the next user has signed in.
  if (isToken && asker === token) signOut(message);
  throw new ApiError(message, { status: answer.status, reason: told?.reason, violations: told?.violations });
}

/** Return the JSON of a GET. */
export const read = async (path, signal) => (await call(path, { signal })).json();

/** Send a change, and return the JSON of its answer, or null where there is none. */
export async function change(method, path, body) {
  const answer = await call(path, { method, body });
  return answer.status === 204 ? null : answer.json();
}

/** Return a path's address from its parts, each encoded, and query parameters; empty ones are left out. */
export function pathOf(parts, query = {}) {
  const asked = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== "" && one !== null && one !== undefined) asked.append(name, one);
    }
  }
  const text = asked.toString();
  return `/${parts.map((part) => encodeURIComponent(part)).join("/")}${text ? `?${text}` : ""}`;
}

// Last answers by path, so that going back shows something at once, while it is asked for again.
const MOST_REMEMBERED = 60;
const remembered = new Map();

/** The last answer of a path, or undefined. */
export const lastAnswer = (path) => remembered.get(path);

/** Read a path and remember its answer. */
export async function readAndRemember(path, signal) {
  const answer = await read(path, signal);
  remembered.delete(path);
  remembered.set(path, answer);
  if (remembered.size > MOST_REMEMBERED) remembered.delete(remembered.keys().next().value);
  return answer;
}

function forget() {
  remembered.clear();
}
