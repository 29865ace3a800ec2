// The page of all runs and jobs: a table with filters, an order, chosen columns and actions for what is selected.

import { get } from "./api.js";
import { empty, runAddress } from "./badges.js";
import { chooseColumns, chosenColumns, chosenKeys, firstOrder, runColumns } from "./columns.js";
import { commandBox, showCommands } from "./dialogs.js";
import { button, h, replace } from "./dom.js";
import { onNews } from "./events.js";
import { filterBar } from "./filter_bar.js";
import { number } from "./format.js";
import { describeKeys, shortcut } from "./keys.js";
import { redraw } from "./morph.js";
import { go, setQuery, setTitle } from "./router.js";
import { fromAddress } from "./runs_query.js";
import { selectionBar } from "./selection_bar.js";
import { me } from "./session.js";
import { Table } from "./table.js";
import { throttle } from "./timing.js";

const SUBMIT = "hvd-transformer submit -np 2 -- --preset tiny";
const NEWEST = { sort: "began", order: "desc" }; // unlike the time of the last change, it keeps rows in their places

/** @param {import("./router.js").View} view */
export async function open({ main, query, signal }) {
  setTitle("Runs");
  const state = fromAddress(query);
  let metrics = [];
  const count = h("span", { class: "count" });
  const notes = h("div", { class: "notices", id: "notes" });

  const load = (cursor, limit) => {
    const { sort, order, ...filter } = state;
    const ordered = sort ? { sort, order } : NEWEST;
    return get("runs", { ...filter, ...ordered, cursor, limit, config: chosenKeys() }, signal);
  };
  const showPage = (page) => {
    metrics = page.keys || metrics;
    redraw(
      notes,
      (page.notes || []).map((line) => h("p", { class: "notice wait" }, line)),
    );
    count.textContent = `${number(page.total)} ${page.total === 1 ? "run" : "runs"}`;
  };
  const showOrder = () =>
    table.setSort(state.sort || NEWEST.sort, (state.sort ? state.order : NEWEST.order) === "desc");
  const changed = () => {
    setQuery(state);
    showOrder();
    table.clearSelection();
    return table.restart();
  };
  const clear = () => {
    Object.assign(state, { text: "", state: "", user: "", tag: "", where: [] });
    filter.show();
    changed();
  };
  const isFiltered = () => Boolean(state.text || state.state || state.user || state.tag || state.where.length);
  const open_ = (run, event) =>
    event.ctrlKey || event.metaKey ? window.open(runAddress(run.id)) : go(runAddress(run.id));
  const table = new Table({
    label: "Runs and jobs",
    columns: runColumns(chosenColumns()),
    load,
    onPage: showPage,
    key: ({ id }) => id,
    onOpen: open_,
    onSort: (key) => {
      Object.assign(state, nextOrder(state, key));
      changed();
    },
    onSelect: (runs) => bar.show(runs),
    empty: () => (isFiltered() ? nothingFound(clear) : nothingYet()),
    signal,
  });
  const bar = selectionBar(table);
  const filter = filterBar(state, changed, signal);
  const columns = async () => {
    if (!(await chooseColumns(metrics))) return;
    table.setColumns(runColumns(chosenColumns()));
    table.refresh();
  };
  const submit = me.queue && me.role !== "view" && button("Submit", howToSubmit, { id: "submit" });
  const space = h("span", { class: "space" });
  const tools = h(
    "div",
    { class: "tools" },
    filter.element,
    space,
    count,
    button("Columns", columns, { id: "columns" }),
    submit,
  );
  main.className = "full";
  replace(main, h("h1", { class: "hidden" }, "Runs and jobs"), tools, notes, table.element, bar.element);

  shortcut("Runs", "/", "filter", () => filter.focus(), signal);
  shortcut("Runs", "o", "columns", columns, signal);
  shortcut("Runs", "c", "compare what is selected", () => bar.compare(), signal);
  describeKeys("Runs", "↑ ↓", "move, also j and k, Page Up and Page Down", signal);
  describeKeys("Runs", "Space", "select, also x; Shift and a click selects a range", signal);
  describeKeys("Runs", "Enter", "open", signal);
  const refresh = throttle(() => table.refresh(), 1000, signal);
  for (const kind of ["run", "job", "waits", "resync"]) onNews(kind, refresh, signal);
  showOrder();
  await table.restart();
  if (!signal.aborted && document.activeElement === document.body) table.element.focus({ preventScroll: true });
}

/** The order after a click on a heading: its first direction, the other one, none. */
function nextOrder({ sort, order }, key) {
  const first = firstOrder(key);
  if (sort !== key) return { sort: key, order: first };
  return order === first ? { sort: key, order: first === "asc" ? "desc" : "asc" } : { sort: "", order: "" };
}

function nothingFound(clear) {
  return empty("No run matches this filter.", button("Clear the filter", clear));
}

function nothingYet() {
  if (me.queue) return empty("No runs yet. Submit the first job from a shell:", commandBox(SUBMIT));
  const command = "hvd-transformer launch -np 2 -- --preset tiny output_dir=runs/first";
  return empty("No run directories here yet. Train something into this folder:", commandBox(command));
}

function howToSubmit() {
  const array = "hvd-transformer submit -np 2 --array optimizer.lr=1e-3,3e-4 --array seed=1,2,3 -- --preset tiny";
  showCommands("Submit a job", [
    { text: "Jobs are submitted from a shell; what follows -- are the arguments of hvd-train.", command: SUBMIT },
    { text: "An array: one job per combination.", command: array },
    { text: "After another job has succeeded:", command: "hvd-transformer submit -np 2 --after 12 -- --preset tiny" },
  ]);
}
