// The tables below the curves of several runs: final metrics with the best ones, and the settings that differ.

import { progress, runAddress } from "./badges.js";
import { swatch } from "./chart.js";
import { h } from "./dom.js";
import { number } from "./format.js";
import { best, metricTitle, sorted } from "./metrics.js";
import { lineStyle } from "./palette.js";

/**
 * @param {{runs: Object[], final: Object<string, (?number)[]>}} compared
 * @returns {HTMLElement}
 */
export function finalTable({ runs, final }) {
  const lines = sorted(Object.keys(final)).map((key) => {
    const winners = best(key, final[key]);
    const cell = (value, index) => h("td", { class: `right ${winners.has(index) ? "winner" : ""}` }, number(value));
    return h("tr", {}, h("th", { scope: "row", title: key }, metricTitle(key)), final[key].map(cell));
  });
  const step = (run) => h("td", { class: "right" }, progress(run.step, run.total_steps, run.state === "RUNNING"));
  const steps = h("tr", {}, h("th", { scope: "row" }, "Step"), runs.map(step));
  return section("Final metrics", table("Final metrics", runs, [steps, ...lines]));
}

/**
 * @param {{runs: Object[], differs: Object<string, any[]>}} compared
 * @returns {?HTMLElement}
 */
export function differenceTable({ runs, differs }) {
  if (runs.length < 2) return null;
  const title = "Settings that differ";
  const keys = Object.keys(differs).sort();
  if (!keys.length) return section(title, h("p", { class: "muted" }, "All settings are the same."));
  const cell = (value) => h("td", { class: "right" }, shown(value));
  const lines = keys.map((key) => h("tr", {}, h("th", { scope: "row" }, key), differs[key].map(cell)));
  return section(title, table(title, runs, lines));
}

function shown(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function section(title, content) {
  return h("section", {}, h("h2", {}, title), content);
}

function table(label, runs, lines) {
  const heads = runs.map((run, index) => {
    const link = h("a", { href: runAddress(run.id), title: run.name }, swatch(lineStyle(index)), run.name);
    return h("th", { scope: "col", class: "right" }, link);
  });
  const head = h("thead", {}, h("tr", {}, h("th", { scope: "col" }), heads));
  return h(
    "div",
    { class: "wider" },
    h("table", { class: "list sticky", "aria-label": label }, head, h("tbody", {}, lines)),
  );
}
