// The page of one run: its head, and tabs with everything that is known of it.

import { get } from "./api.js";
import { WAITING } from "./badges.js";
import { h, replace } from "./dom.js";
import { onNews } from "./events.js";
import { ACTIONS, actionsFor, actOn } from "./job_actions.js";
import { shortcut } from "./keys.js";
import { showError } from "./messages.js";
import { setQuery, setTitle } from "./router.js";
import { drawHead } from "./run_head.js";
import { makeTabs } from "./tabs.js";
import { throttle } from "./timing.js";

// `drawn`: drawn again whenever the run changes; the others look after themselves. `count`: what the tab counts.
const TABS = [
  { id: "curves", title: "Curves", load: () => import("./run_curves.js") },
  { id: "ranks", title: "Ranks", load: () => import("./run_ranks.js"), drawn: true, count: "ranks" },
  { id: "attempts", title: "Attempts", load: () => import("./run_attempts.js"), drawn: true, count: "attempts" },
  {
    id: "checkpoints",
    title: "Checkpoints",
    load: () => import("./run_checkpoints.js"),
    drawn: true,
    count: "checkpoints",
  },
  { id: "log", title: "Log", load: () => import("./run_log.js") },
  { id: "config", title: "Configuration", load: () => import("./run_config.js") },
  { id: "samples", title: "Samples", load: () => import("./run_samples.js"), drawn: true, count: "samples" },
];
const REFRESH_MS = 1000;

/** @param {import("./router.js").View} view */
export async function open({ main, params: [id], query, signal }) {
  const kept = Object.fromEntries(query);
  const keep = (values) => setQuery(Object.assign(kept, values));
  const head = h("div", { class: "run-head" }, h("h1", {}, h("span", { class: "skeleton" })));
  replace(main, head);
  const run = await get(`runs/${id}`, {}, signal);
  if (signal.aborted) return;
  setTitle(run.name);

  const changes = new EventTarget();
  const show = async ({ load, drawn }, panel, inner) => {
    const onChange = (action) => changes.addEventListener("change", action, { signal: inner });
    try {
      const part = await load();
      if (inner.aborted) return;
      part.show(panel, run, inner, { keep, onChange });
      if (drawn) onChange(() => part.show(panel, run, inner));
    } catch (error) {
      showError(error);
    }
  };
  const first = query.get("tab") || (run.step === null ? "config" : "curves");
  const made = TABS.map((tab) => ({ ...tab, show: (panel, inner) => show(tab, panel, inner) }));
  const tabs = makeTabs(made, first, (shown) => keep({ tab: shown === "curves" ? "" : shown }), signal);
  const draw = () => {
    drawHead(head, run, refresh);
    for (const { id: name, count } of TABS) if (count) tabs.count(name, run[count]?.length || "");
  };
  const read = async () => {
    try {
      Object.assign(run, await get(`runs/${id}`, {}, signal));
      draw();
      changes.dispatchEvent(new Event("change"));
    } catch (error) {
      showError(error);
    }
  };
  const refresh = throttle(read, REFRESH_MS, signal);
  draw();
  main.append(tabs.element);

  onNews("run", (news) => news.id === id && refresh(), signal);
  onNews("job", (news) => (news.run === id || news.id === run.job?.id) && refresh(), signal);
  onNews("waits", () => WAITING.includes(run.state) && refresh(), signal);
  onNews("resync", refresh, signal);
  const act = async (name) => {
    if (actionsFor(run.job).includes(name) && (await actOn(name, run.job))) refresh();
  };
  shortcut("Run", "c", ACTIONS.cancel.text.toLowerCase(), () => act("cancel"), signal);
  shortcut("Run", "r", ACTIONS.retry.text.toLowerCase(), () => act("retry"), signal);
}
