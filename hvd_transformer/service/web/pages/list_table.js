// A plain table of a few hundred rows, without windows or selection.

import { append, h } from "./dom.js";

/**
 * @param {{title: string, right?: boolean, phone?: boolean, cell: (row: any) => any}[]} columns those without `phone` are hidden on narrow screens
 * @param {any[]} rows
 * @param {{label: string, rowClass?: (row: any) => string}} options
 * @returns {HTMLElement}
 */
export function listTable(columns, rows, { label, rowClass = () => "" }) {
  const style = ({ right, phone }) => `${right ? "right" : ""} ${phone ? "" : "wide"}`.trim();
  const head = h(
    "tr",
    {},
    columns.map((column) => h("th", { scope: "col", class: style(column) }, column.title)),
  );
  const body = h("tbody");
  append(
    body,
    rows.map((row) =>
      h(
        "tr",
        { class: rowClass(row) },
        columns.map((column) => h("td", { class: style(column) }, column.cell(row))),
      ),
    ),
  );
  return h("div", { class: "wider" }, h("table", { class: "list", "aria-label": label }, h("thead", {}, head), body));
}
