// The checkpoints of a run: which is the best, which the latest, and how to use one.

import { empty } from "./badges.js";
import { commandBox } from "./dialogs.js";
import { h } from "./dom.js";
import { bytes, number, when } from "./format.js";
import { listTable } from "./list_table.js";
import { redraw } from "./morph.js";
import { best, metricTitle, sorted } from "./metrics.js";

/**
 * @param {HTMLElement} panel
 * @param {Object} run
 */
export function show(panel, run) {
  const checkpoints = run.checkpoints || [];
  if (!checkpoints.length) {
    redraw(
      panel,
      empty("No checkpoint yet. checkpoint.every_steps and checkpoint.every_seconds say when there is one."),
    );
    return;
  }
  const keys = sorted([...new Set(checkpoints.flatMap(({ metrics }) => Object.keys(metrics || {})))]).slice(0, 5);
  const winners = new Map(
    keys.map((key) => [
      key,
      best(
        key,
        checkpoints.map(({ metrics }) => metrics?.[key]),
      ),
    ]),
  );
  const columns = [
    { title: "Step", right: true, phone: true, cell: ({ step }) => number(step) },
    {
      title: "",
      phone: true,
      cell: (one) => [
        one.best && h("span", { class: "mark good" }, "best"),
        one.latest && h("span", { class: "mark" }, "latest"),
      ],
    },
    ...keys.map((key) => ({
      title: metricTitle(key),
      right: true,
      cell: (one) =>
        h(
          "span",
          { class: winners.get(key).has(checkpoints.indexOf(one)) ? "winner" : "" },
          number(one.metrics?.[key]),
        ),
    })),
    { title: "Size", right: true, phone: true, cell: (one) => bytes(one.bytes) },
    { title: "Written", right: true, phone: true, cell: ({ time }) => when(time) },
  ];
  const folder = run.job?.output_dir || run.config.output_dir || run.name;
  const use =
    { language_model: "generate", translation: "translate", classification: "classify" }[run.task] || "evaluate";
  redraw(
    panel,
    listTable(
      columns,
      checkpoints.toSorted((a, b) => b.step - a.step),
      { label: "Checkpoints" },
    ),
    h("p", { class: "muted" }, "Use the best one:"),
    commandBox(`hvd-transformer ${use} ${quote(folder)}`),
  );
}

function quote(text) {
  return /^[\w./:@%+=-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
