// Tabs: one part of a page is shown at a time, chosen with the mouse, the arrow keys or a number.

import { h, replace } from "./dom.js";
import { shortcut } from "./keys.js";

/**
 * @typedef {Object} Tab
 * @property {string} id
 * @property {string} title
 * @property {(panel: HTMLElement, signal: AbortSignal) => void} show fills the panel; `signal` is aborted when another tab is shown
 */

/**
 * Makes tabs.
 * @param {Tab[]} tabs
 * @param {string} chosen id of the first one shown
 * @param {(id: string) => void} onChange
 * @param {AbortSignal} signal
 * @returns {{element: HTMLElement, count: (id: string, text: string) => void, current: () => string}}
 */
export function makeTabs(tabs, chosen, onChange, signal) {
  const panel = h("div", { role: "tabpanel", id: "panel", class: "panel" });
  let inner = new AbortController();
  let current = "";
  signal.addEventListener("abort", () => inner.abort());
  const counts = new Map(tabs.map(({ id }) => [id, h("span", { class: "number" })]));
  const buttons = tabs.map(({ id, title }) =>
    h(
      "button",
      { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": "panel", on: { click: () => choose(id) } },
      title,
      counts.get(id),
    ),
  );
  const list = h("div", { class: "tabs", role: "tablist" }, buttons);
  const choose = (id) => {
    if (id === current) return;
    current = id;
    inner.abort();
    inner = new AbortController();
    tabs.forEach((tab, index) => {
      buttons[index].setAttribute("aria-selected", String(tab.id === id));
      buttons[index].tabIndex = tab.id === id ? 0 : -1;
    });
    // On a phone there is no room for all tabs. The first time, they are not on the page before the next frame.
    const button = buttons[tabs.findIndex((tab) => tab.id === id)];
    requestAnimationFrame(() => {
      list.scrollLeft = button.offsetLeft - list.offsetLeft - (list.clientWidth - button.offsetWidth) / 2;
    });
    panel.setAttribute("aria-labelledby", `tab-${id}`);
    replace(panel);
    tabs.find((tab) => tab.id === id).show(panel, inner.signal);
    onChange(id);
  };
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = (tabs.findIndex(({ id }) => id === current) + step + tabs.length) % tabs.length;
    choose(tabs[next].id);
    buttons[next].focus();
  });
  tabs.forEach(({ id, title }, index) => shortcut("Run", String(index + 1), title, () => choose(id), signal));
  choose(tabs.some(({ id }) => id === chosen) ? chosen : tabs[0].id);
  return {
    element: h("div", { class: "tabbed" }, list, panel),
    count: (id, text) => (counts.get(id).textContent = text),
    current: () => current,
  };
}
