// The ranks of a run: where each one is, its memory and work, and which one the others wait for.

import { ACTIVE, empty } from "./badges.js";
import { h } from "./dom.js";
import { bytes, compact, duration, number } from "./format.js";
import { listTable } from "./list_table.js";
import { redraw } from "./morph.js";

const SILENT_SECONDS = 10;

/**
 * @param {HTMLElement} panel
 * @param {Object} run
 */
export function show(panel, run) {
  const ranks = run.ranks || [];
  if (!ranks.length) {
    redraw(
      panel,
      empty(
        ACTIVE.includes(run.state)
          ? "The ranks are starting: they appear with their first sign of life."
          : "No ranks are running.",
      ),
    );
    return;
  }
  const most = (key) => Math.max(...ranks.map((rank) => rank[key] || 0)) || 1;
  const memory = most("memory");
  const work = most("work_seconds");
  const speed = most("tokens_per_second");
  const columns = [
    { title: "Rank", right: true, phone: true, cell: ({ rank }) => number(rank) },
    { title: "Host", phone: true, cell: ({ host }) => h("span", { class: "one-line" }, host ?? "–") },
    { title: "Step", right: true, cell: ({ step }) => number(step) },
    { title: "Phase", phone: true, cell: phase },
    { title: "Memory", right: true, cell: (rank) => bar(rank.memory, memory, bytes) },
    { title: "Work per step", right: true, cell: (rank) => bar(rank.work_seconds, work, () => workOf(rank)) },
    { title: "Tokens/s", right: true, cell: (rank) => bar(rank.tokens_per_second, speed, compact) },
    {
      title: "Heard from",
      right: true,
      phone: true,
      cell: ({ age }) =>
        h("span", { class: age > SILENT_SECONDS ? "warn" : "" }, age < 1 ? "now" : `${duration(age)} ago`),
    },
  ];
  redraw(panel, listTable(columns, ranks, { label: "Ranks", rowClass: ({ late }) => (late ? "late" : "") }));
}

function phase({ phase: name, waits_for: waits, late }) {
  return [
    late && h("span", { class: "mark bad" }, "late"),
    name || "–",
    waits && h("span", { class: "muted" }, ` waits for ${waits}`),
  ];
}

function workOf({ work_seconds: seconds, work_ratio: ratio }) {
  const relative = ratio === null ? "" : ` ${ratio.toFixed(2)}×`;
  return [`${number(1000 * seconds)} ms`, h("span", { class: "muted", title: "relative to the other ranks" }, relative)];
}

function bar(value, most, text) {
  if (value === null || value === undefined) return "–";
  return h(
    "span",
    { class: "meter" },
    h("span", { class: "track" }, h("span", { style: { width: `${(100 * value) / most}%` } })),
    h("span", {}, text(value)),
  );
}
