// Calls of the service's HTTP interface. Every failure is an ApiError whose message is one line.

const BASE = "/api/v1/";
let csrf = "";

/** A call that did not work. `status`: HTTP's, or 0 where the service was not reached. */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {string} line
   * @param {string} method
   */
  constructor(status, line, method) {
    super(line);
    this.status = status;
    this.method = method;
  }
}

/**
 * Sets what every change must carry.
 * @param {string} token
 */
export function setCsrf(token) {
  csrf = token;
}

/**
 * Reads. Parameters that are empty are left out; a list is repeated.
 * @param {string} path below /api/v1/
 * @param {Object<string, any>} [params]
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export function get(path, params = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== "" && one !== null && one !== undefined) query.append(key, one);
    }
  }
  return call("GET", BASE + path + (query.size ? `?${query}` : ""), undefined, signal);
}

/**
 * Changes something.
 * @param {string} path below /api/v1/
 * @param {any} [body]
 * @returns {Promise<any>}
 */
export function post(path, body = {}) {
  return call("POST", BASE + path, body);
}

/**
 * Logs in: the service sets a cookie.
 * @param {string} token
 */
export async function login(token) {
  await call("POST", "/login", { token });
}

/** Logs out. */
export async function logout() {
  await call("POST", "/logout", {});
}

async function call(method, url, body, signal) {
  const headers = { Accept: "application/json" };
  if (method !== "GET") Object.assign(headers, { "Content-Type": "application/json", "X-CSRF": csrf });
  let response;
  let text;
  try {
    response = await fetch(url, {
      method,
      headers,
      body: body && JSON.stringify(body),
      signal,
      credentials: "same-origin",
    });
    text = await response.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const what =
      method === "GET" ? "No connection to the service." : "Nothing was changed: no connection to the service.";
    throw new ApiError(0, what, method);
  }
  const answer = parsed(text);
  if (!response.ok)
    throw new ApiError(response.status, answer?.error || `${url}: ${response.status} ${response.statusText}`, method);
  return answer;
}

function parsed(text) {
  try {
    return text ? JSON.parse(text) : null;
  } catch {
    return null;
  }
}
