// The curves of a run: one chart per metric, its values on training and validation data together.

import { empty, WAITING } from "./badges.js";
import { Charts } from "./charts.js";
import { Curves } from "./curves.js";
import { replace } from "./dom.js";
import { onNews } from "./events.js";
import { chartGroups } from "./metrics.js";
import { lineStyle } from "./palette.js";

const DASHED = [6, 3];

/**
 * @param {HTMLElement} panel
 * @param {Object} run
 * @param {AbortSignal} signal
 * @param {{keep: (values: Object<string, any>) => void, onChange: (action: () => void) => void}} page
 */
export function show(panel, run, signal, { keep, onChange }) {
  const curves = new Curves(run.id);
  // Until the first curves are read the newest values tell which there are; some of them have no curve.
  const update = () => {
    const keys = curves.available.length ? curves.available : Object.keys(run.metrics);
    charts.toolbar.hidden = !keys.length;
    if (keys.length) charts.setPlots(chartGroups(keys).map((group) => plotOf(group, curves, run)));
    else replace(charts.grid, empty(nothingYet(run)));
  };
  const query = new URLSearchParams(location.search);
  const charts = new Charts({ query, onLook: keep, onRead: update, signal });
  replace(panel, charts.toolbar, charts.grid);
  onNews("run", ({ id }) => id === run.id && charts.follow(), signal);
  onNews("resync", () => charts.follow(), signal);
  onChange(update);
  update();
}

function plotOf({ title, keys }, source, run) {
  const lines = keys.map((key, index) => ({
    source,
    key,
    label: /^(valid|test)_/.exec(key)?.[1] || "train",
    last: () => run.metrics[key],
    style: () => ({ ...lineStyle(index), dash: index ? DASHED : [] }),
  }));
  return { id: keys[0], title, lines };
}

function nothingYet({ state }) {
  if (WAITING.includes(state)) return "Curves appear when the job runs.";
  return "No metrics yet: they appear after training.log_every steps.";
}
