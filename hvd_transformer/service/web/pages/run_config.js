// The configuration of a run, by key, with a filter.

import { empty } from "./badges.js";
import { copyButton } from "./dialogs.js";
import { h, replace } from "./dom.js";
import { shortcut } from "./keys.js";

/**
 * @param {HTMLElement} panel
 * @param {Object} run
 * @param {AbortSignal} signal
 */
export function show(panel, run, signal) {
  const entries = Object.entries(run.config || run.job?.config || {}).sort(([a], [b]) => a.localeCompare(b));
  if (!entries.length) {
    replace(panel, empty("This run has no config.yaml that can be read."));
    return;
  }
  const list = h("dl", { class: "config" });
  const count = h("span", { class: "count" });
  const box = h("input", {
    type: "search",
    id: "config-filter",
    "aria-label": "Filter the configuration",
    placeholder: "Filter keys and values",
    autocomplete: "off",
    on: { input: () => draw() },
  });
  const chosen = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    return entries.filter(([key, value]) =>
      words.every((word) => `${key}=${text(value)}`.toLowerCase().includes(word)),
    );
  };
  const draw = () => {
    const rows = chosen();
    count.textContent =
      rows.length === entries.length ? `${rows.length} keys` : `${rows.length} of ${entries.length} keys`;
    let section = "";
    replace(
      list,
      rows.map(([key, value]) => {
        const group = key.includes(".") ? key.split(".")[0] : "";
        const first = group !== section;
        section = group;
        return h(
          "div",
          { class: first ? "first" : "" },
          h("dt", {}, key),
          h("dd", { title: text(value) }, text(value)),
        );
      }),
    );
  };
  const copy = copyButton(
    () =>
      chosen()
        .map(([key, value]) => `${key}=${text(value)}`)
        .join("\n"),
    "Copy as KEY=VALUE",
  );
  replace(panel, h("div", { class: "tools" }, box, h("span", { class: "space" }), count, copy), list);
  shortcut("Run", "/", "filter the configuration", () => box.select(), signal);
  draw();
}

function text(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}
