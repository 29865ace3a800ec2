// Keyboard shortcuts, and the list of them under "?".

import { openDialog } from "./dialogs.js";
import { h } from "./dom.js";

/** @type {{keys: string, text: string, action: ?(event: KeyboardEvent) => void, group: string}[]} */
let shortcuts = [];
let first = "";
let firstTimer = 0;

/**
 * Adds a shortcut: a key ("/"), or two in a row ("g r").
 * @param {string} group heading in the list
 * @param {string} keys
 * @param {string} text what it does
 * @param {(event: KeyboardEvent) => void} action
 * @param {AbortSignal} [signal] removes it
 */
export function shortcut(group, keys, text, action, signal = undefined) {
  const entry = { group, keys, text, action };
  shortcuts.push(entry);
  signal?.addEventListener("abort", () => {
    shortcuts = shortcuts.filter((other) => other !== entry);
  });
}

/** Lists keys that a widget handles itself; arguments as those of `shortcut`. */
export function describeKeys(group, keys, text, signal) {
  shortcut(group, keys, text, null, signal);
}

/** Starts listening to keys. */
export function startKeys() {
  document.addEventListener("keydown", pressed);
}

/** Shows all shortcuts. */
export function showHelp() {
  const groups = new Map();
  for (const entry of shortcuts) groups.set(entry.group, [...(groups.get(entry.group) || []), entry]);
  const lists = [...groups].map(([name, entries]) => [
    h("h3", {}, name),
    h(
      "dl",
      { class: "keys" },
      entries.map(({ keys, text }) =>
        h(
          "div",
          {},
          h(
            "dt",
            {},
            keys.split(" ").map((key) => [h("kbd", {}, key), " "]),
          ),
          h("dd", {}, text),
        ),
      ),
    ),
  ]);
  openDialog({
    title: "Keyboard shortcuts",
    content: h("div", { class: "shortcuts" }, lists),
    buttons: [{ text: "Close", value: "" }],
  });
}

function pressed(event) {
  if (
    event.ctrlKey ||
    event.metaKey ||
    event.altKey ||
    event.defaultPrevented ||
    document.querySelector("dialog[open]")
  )
    return;
  if (event.target.closest?.("input:not([type=checkbox]):not([type=range]), textarea, select, [contenteditable]"))
    return;
  const typed = first ? `${first} ${event.key}` : event.key;
  const hit = shortcuts.findLast(({ keys, action }) => action && keys === typed);
  clearTimeout(firstTimer);
  first = "";
  if (hit) {
    event.preventDefault();
    hit.action(event);
  } else if (shortcuts.some(({ keys, action }) => action && keys.startsWith(`${event.key} `))) {
    first = event.key;
    firstTimer = setTimeout(() => (first = ""), 1500);
  }
}
