// The page that compares runs: their curves on shared charts, the settings that differ, and the final metrics.

import { get } from "./api.js";
import { empty, runAddress, stateBadge } from "./badges.js";
import { swatch } from "./chart.js";
import { Charts } from "./charts.js";
import { differenceTable, finalTable } from "./compare_tables.js";
import { Curves } from "./curves.js";
import { copyButton } from "./dialogs.js";
import { button, h, replace } from "./dom.js";
import { onNews } from "./events.js";
import { showError } from "./messages.js";
import { metricTitle, sorted } from "./metrics.js";
import { redraw } from "./morph.js";
import { lineStyle } from "./palette.js";
import { setQuery, setTitle } from "./router.js";
import { runPicker } from "./run_picker.js";
import { throttle } from "./timing.js";

const MOST = 20;
const REFRESH_MS = 5000; // of the tables; curves follow at once

/** @param {import("./router.js").View} view */
export async function open({ main, query, signal }) {
  setTitle("Compare");
  const kept = Object.fromEntries(query);
  const keep = (values) => setQuery(Object.assign(kept, values));
  let ids = [...new Set((query.get("runs") || "").split(",").filter(Boolean))].slice(0, MOST);
  let compared = { runs: [], differs: {}, final: {}, missing: [] };
  const sources = new Map(); // curves by run
  const hidden = new Set();

  const charts = new Charts({ query, onLook: keep, many: true, signal });
  const legend = h("ul", { class: "legend", "aria-label": "Runs" });
  const tables = h("div", { class: "tables" });
  const picker = runPicker({ chosen: () => ids, onPick: (id) => choose([...ids, id]), signal });

  const choose = (wanted) => {
    ids = wanted.slice(0, MOST);
    keep({ runs: ids.join(",") });
    return read();
  };
  const toggle = (id) => {
    if (!hidden.delete(id)) hidden.add(id);
    draw();
    charts.reload();
  };
  const lineOf = (key) => (run, index) => ({
    source: sources.get(run.id),
    key,
    label: run.name,
    hidden: hidden.has(run.id) || run.metrics[key] === undefined,
    last: () => run.metrics[key],
    style: () => lineStyle(index),
  });
  const draw = () => {
    const { runs } = compared;
    const remove = (id) => choose(ids.filter((other) => other !== id));
    redraw(
      legend,
      runs.map((run, index) => legendItem(run, index, !hidden.has(run.id), { toggle, remove })),
    );
    const keys = sorted([...new Set(runs.flatMap(({ metrics }) => Object.keys(metrics || {})))]);
    charts.setPlots(keys.map((key) => ({ id: key, title: metricTitle(key), lines: runs.map(lineOf(key)) })));
    redraw(tables, runs.length ? [finalTable(compared), differenceTable(compared)] : nothingChosen());
    charts.toolbar.hidden = !runs.length;
    picker.element.hidden = ids.length >= MOST;
  };
  const leaveOut = (gone) => {
    ids = ids.filter((id) => !gone.includes(id));
    keep({ runs: ids.join(",") });
  };
  const readTables = async () => {
    try {
      const nothing = { runs: [], differs: {}, final: {}, missing: [] };
      compared = ids.length ? await get("compare", { runs: ids.join(",") }, signal) : nothing;
    } catch (error) {
      showError(error);
      if (error.status === 404) leaveOut(ids);
      return;
    }
    if (compared.missing.length) {
      const those = compared.missing.length === 1 ? "A run" : `${compared.missing.length} runs`;
      showError(new Error(`${those} of this comparison no longer exist${compared.missing.length === 1 ? "s" : ""}`));
      leaveOut(compared.missing);
    }
    for (const { id } of compared.runs) if (!sources.has(id)) sources.set(id, new Curves(id));
    draw();
  };
  const read = async () => {
    await readTables();
    charts.reload();
  };
  const again = throttle(readTables, REFRESH_MS, signal);
  const follow = () => {
    charts.follow();
    again();
  };
  const space = h("span", { class: "space" });
  const tools = h(
    "div",
    { class: "tools" },
    h("h1", {}, "Compare"),
    picker.element,
    space,
    copyButton(() => location.href, "Copy link"),
  );
  replace(main, tools, legend, charts.toolbar, charts.grid, tables);
  onNews("run", ({ id }) => ids.includes(id) && follow(), signal);
  onNews("resync", follow, signal);
  addEventListener("themechange", draw, { signal });
  await readTables(); // the charts read what comes into sight
}

function legendItem({ id, name, state }, index, shown, { toggle, remove }) {
  const change = () => toggle(id);
  const box = h("input", { type: "checkbox", checked: shown, "aria-label": `Show ${name}`, on: { change } });
  const close = button("×", () => remove(id), {
    class: "icon",
    title: "Remove from the comparison",
    "aria-label": `Remove ${name}`,
  });
  const link = h("a", { href: runAddress(id), title: name }, name);
  return h("li", {}, h("label", {}, box, swatch(lineStyle(index))), link, stateBadge(state), close);
}

function nothingChosen() {
  const text = "Choose runs to compare: search above, or select rows on the page of runs and press Compare.";
  return empty(text, h("a", { href: "/" }, "All runs"));
}
