// Shows the page that the address names, and keeps what a page shows in the address.

import { replace } from "./dom.js";
import { onNews } from "./events.js";
import { showError } from "./messages.js";

/**
 * @typedef {Object} View
 * @property {HTMLElement} main where the page puts itself
 * @property {string[]} params parts of the path
 * @property {URLSearchParams} query
 * @property {AbortSignal} signal aborted when the page is left
 */

const PAGES = [
  [/^\/$/, () => import("./runs_page.js")],
  [/^\/queue$/, () => import("./queue_page.js")],
  [/^\/compare$/, () => import("./compare_page.js")],
  [/^\/hosts$/, () => import("./hosts_page.js")],
  [/^\/runs\/([0-9a-z-]+)$/, () => import("./run_page.js")],
  [/^/, () => import("./missing_page.js")],
];

let leave = new AbortController();
let failed = false; // the page is not there: it is tried again with the connection

// The first page's modules arrive while the service is asked who we are; `show` tells if they do not.
pageAt(location.pathname).load().catch(() => {});

/** Follows the address from now on. */
export function startRouter() {
  addEventListener("popstate", show);
  onNews("resync", () => failed && show());
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href]");
    if (
      !link ||
      event.defaultPrevented ||
      event.button !== 0 ||
      event.metaKey ||
      event.ctrlKey ||
      event.shiftKey ||
      event.altKey
    )
      return;
    const url = new URL(link.href);
    if (url.origin !== location.origin || url.pathname.startsWith("/static/") || url.hash || link.target) return;
    event.preventDefault();
    go(url.pathname + url.search);
  });
  show();
}

/**
 * Goes to a page.
 * @param {string} address
 */
export function go(address) {
  history.pushState(null, "", address);
  show();
}

/** Shows the current page anew. */
export async function show() {
  leave.abort();
  leave = new AbortController();
  const { signal } = leave;
  const main = document.getElementById("main");
  const path = location.pathname;
  for (const link of document.querySelectorAll("#nav a")) {
    const here = link.pathname === path || (link.pathname === "/" && path.startsWith("/runs/"));
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  failed = false;
  const { pattern, load } = pageAt(path);
  try {
    const page = await load();
    if (signal.aborted) return;
    replace(main);
    main.className = "";
    scrollTo(0, 0);
    await page.open({ main, params: pattern.exec(path).slice(1), query: new URLSearchParams(location.search), signal });
  } catch (error) {
    if (error.name === "AbortError") return;
    failed = true;
    const isScript = error.message.includes("dynamically imported module");
    showError(isScript ? new Error("The page could not be loaded: no connection to the service.") : error);
  }
}

function pageAt(path) {
  const [pattern, load] = PAGES.find(([candidate]) => candidate.test(path));
  return { pattern, load };
}

/**
 * Replaces the query of the address; the page stays.
 * @param {Object<string, any>} values empty ones are left out; a list is repeated
 */
export function setQuery(values) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== "" && one !== null && one !== undefined && one !== false) query.append(key, one === true ? "1" : one);
    }
  }
  // Commas and colons are legal there, and people read these addresses.
  const text = query.toString().replaceAll("%2C", ",").replaceAll("%3A", ":");
  history.replaceState(null, "", location.pathname + (text ? `?${text}` : ""));
}

/**
 * Sets the title of the window.
 * @param {string} title
 */
export function setTitle(title) {
  document.title = title ? `${title} · hvd-transformer` : "hvd-transformer";
}
