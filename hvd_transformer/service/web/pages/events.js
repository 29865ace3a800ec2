// News from the service, one stream per browser: of the visible tabs one leads, and shares its stream with the others.
//
// Browsers open six connections to a server, so a stream in every tab would block the seventh. The leader holds a lock;
// when it is hidden or closed, the next visible tab takes the lock and resumes after the last event. Without locks (pages
// over plain HTTP from another machine) every visible tab has a stream of its own.

import { readStream } from "./stream.js";

const URL_OF_EVENTS = "/api/v1/events";
const HIDDEN_MS = 3000;
const LONGEST_WAIT_MS = 15000;

const target = new EventTarget();
const channel = new BroadcastChannel("hvd-transformer");
let lastId = null;
let leading = null; // aborts this tab's wish to lead
let hiddenTimer = 0;
let retryNow = () => {};
let status = { state: "connecting", since: Date.now() };

channel.onmessage = ({ data }) => receive(data);

/**
 * Listens to news: kinds "job", "run", "hosts" and "waits" of the service; "resync": something may have been missed, read again;
 * "status": {state: "connecting" | "live" | "lost", since, retryAt}; "logged-out".
 * @param {string} kind
 * @param {(data: any) => void} listener
 * @param {AbortSignal} [signal]
 */
export function onNews(kind, listener, signal = undefined) {
  target.addEventListener(kind, (event) => listener(event.detail), { signal });
}

/** The state of the connection. */
export function connection() {
  return status;
}

/**
 * Starts listening; the page must be logged in.
 * @param {string} since id of a moment before the page's first read: what happens between the two is news as well
 */
export function startNews(since) {
  lastId ??= since;
  document.addEventListener("visibilitychange", seen);
  addEventListener("online", () => retryNow());
  seen();
}

/** Tries to connect at once. */
export function reconnect() {
  retryNow();
  channel.postMessage({ kind: "retry" });
}

function emit(kind, data) {
  target.dispatchEvent(new CustomEvent(kind, { detail: data }));
}

function share(kind, data, id = null) {
  const message = { kind, data, id };
  channel.postMessage(message);
  receive(message);
}

function receive({ kind, data, id }) {
  if (kind === "retry") {
    retryNow();
    return;
  }
  if (kind === "status?") {
    if (leading?.held) channel.postMessage({ kind: "status", data: status });
    return;
  }
  if (id) lastId = id;
  if (kind === "status") status = data;
  if (!document.hidden || kind === "status") emit(kind, data);
}

function seen() {
  clearTimeout(hiddenTimer);
  if (document.hidden) {
    hiddenTimer = setTimeout(() => {
      leading?.abort();
      leading = null;
    }, HIDDEN_MS);
    return;
  }
  emit("resync", null);
  if (leading) return;
  leading = new AbortController();
  channel.postMessage({ kind: "status?" });
  lead(leading);
}

async function lead(own) {
  const work = async () => {
    own.held = true;
    await keepStream(own.signal);
  };
  try {
    if (navigator.locks) await navigator.locks.request("hvd-transformer-events", { signal: own.signal }, work);
    else await work();
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
}

async function keepStream(signal) {
  let wait = 0;
  let broken = false;
  while (!signal.aborted) {
    const refused = await readStream(URL_OF_EVENTS, {
      lastId,
      signal,
      onOpen: () => {
        wait = 0;
        share("status", { state: "live", since: Date.now() });
        if (broken) share("resync", null);
      },
      onEvent: share,
    });
    if (signal.aborted) return;
    if (refused === 401) {
      share("logged-out", null);
      return;
    }
    broken = true;
    wait = Math.min(LONGEST_WAIT_MS, wait ? wait * 2 : 1000);
    const since = status.state === "lost" ? status.since : Date.now();
    share("status", { state: "lost", since, retryAt: Date.now() + wait });
    await pause(wait, signal);
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    retryNow = () => {
      clearTimeout(timer);
      resolve();
    };
    signal.addEventListener("abort", retryNow, { once: true });
  });
}
