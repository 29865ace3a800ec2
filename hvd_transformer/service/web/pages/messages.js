// Errors are lines at the top of the page that stay until they are closed. Confirmations lie over its bottom and go by
// themselves: they must not move what is being clicked.

import { h } from "./dom.js";

const MOST = 5;
let toLogin = () => {};

/**
 * Sets what happens where the session has ended.
 * @param {() => void} action
 */
export function onLoggedOut(action) {
  toLogin = action;
}

/**
 * Shows an error of a call. A reading that finds no service is left to the connection's own sign; an aborted one is none.
 * @param {Error} error
 */
export function showError(error) {
  if (error.name === "AbortError" || (error.status === 0 && error.method === "GET")) return;
  if (error.status === 401) {
    toLogin();
    return;
  }
  show("error", ".errors", error.message || String(error));
}

/**
 * Says that something was done.
 * @param {string} text
 */
export function showDone(text) {
  const line = show("done", ".confirmations", text);
  setTimeout(() => line.remove(), 6000);
}

function show(kind, place, text) {
  const box = document.querySelector(`#messages ${place}`);
  const same = [...box.children].find((line) => line.dataset.text === text);
  if (same) {
    same.dataset.times = String(Number(same.dataset.times) + 1);
    same.querySelector(".times").textContent = ` (${same.dataset.times} times)`;
    return same;
  }
  const line = h(
    "p",
    { class: `message ${kind}`, data: { text, times: 1 } },
    h("span", {}, text),
    h("span", { class: "times" }),
    h(
      "button",
      { type: "button", class: "icon", "aria-label": "Close this message", on: { click: () => line.remove() } },
      "×",
    ),
  );
  box.append(line);
  while (box.children.length > MOST) box.firstElementChild.remove();
  return line;
}
