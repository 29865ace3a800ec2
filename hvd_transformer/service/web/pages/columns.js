// The columns that the table of runs can have: facts of a run, its last metrics, and values of its configuration.

import { progress, runAddress, stateBadge, tagList } from "./badges.js";
import { openDialog } from "./dialogs.js";
import { h, narrow } from "./dom.js";
import { compact, number, when } from "./format.js";
import { metricTitle } from "./metrics.js";

const STORED = "columns";

const FACTS = {
  state: { title: "State", cell: (run) => stateBadge(run.state), width: "112px", sort: "state", phone: true },
  progress: {
    title: "Step",
    cell: (run) => progress(run.step, run.total_steps, run.state === "RUNNING"),
    width: "136px",
    sort: "step",
    right: true,
  },
  epoch: { title: "Epoch", cell: (run) => number(run.epoch), width: "70px", sort: "epoch", right: true },
  task: { title: "Task", cell: (run) => run.task || "–", width: "136px", sort: "task" },
  world: {
    title: "Ranks",
    cell: (run) => number(run.world ?? run.job?.needs?.num_ranks),
    width: "66px",
    sort: "world",
    right: true,
  },
  speed: {
    title: "Tokens/s",
    cell: (run) => compact(run.tokens_per_second),
    width: "92px",
    sort: "tokens_per_second",
    right: true,
  },
  user: { title: "User", cell: (run) => run.user || "–", width: "92px", sort: "user" },
  job: { title: "Job", cell: (run) => run.job?.id ?? "–", width: "62px", sort: "job", right: true },
  began: { title: "Began", cell: (run) => when(run.began), width: "100px", sort: "began", right: true },
  updated: {
    title: "Updated",
    cell: (run) => when(run.updated ?? run.job?.ended ?? run.job?.submitted),
    width: "100px",
    sort: "updated",
    right: true,
  },
  end: {
    title: "Ends",
    cell: (run) => when(run.estimated_end),
    width: "92px",
    sort: "estimated_end",
    right: true,
    hint: "Estimated from the speed and the steps that are left",
  },
};

const FIRST = ["state", "progress", "metric:loss", "metric:valid_loss", "world", "speed", "user", "began", "end"];

/** The ids of the columns that the user has chosen. */
export function chosenColumns() {
  try {
    const stored = JSON.parse(localStorage.getItem(STORED));
    if (Array.isArray(stored) && stored.every((id) => typeof id === "string")) return stored;
  } catch {
    // Then the first choice is shown.
  }
  return FIRST;
}

/** The keys of the configuration among the chosen columns. */
export function chosenKeys() {
  return chosenColumns()
    .filter((id) => id.startsWith("config:"))
    .map((id) => id.slice(7));
}

/**
 * The columns of the table.
 * @param {string[]} ids
 * @returns {import("./table.js").Column[]}
 */
export function runColumns(ids) {
  return [{ id: "name", title: "Name", cell: nameCell, sort: "name", phone: true }, ...ids.map(column).filter(Boolean)];
}

/**
 * The direction in which a column is sorted first: names, ends and losses upwards, what is better when it is more downwards.
 * @param {string} key
 * @returns {"asc" | "desc"}
 */
export function firstOrder(key) {
  return /^(name|user|state|task|estimated_end)$|loss|perplexity/.test(key) ? "asc" : "desc";
}

function column(id) {
  const [kind, ...rest] = id.split(":");
  const key = rest.join(":");
  if (!key) return FACTS[id] && { id, ...FACTS[id] };
  if (kind === "metric")
    return {
      id,
      title: metricTitle(key),
      hint: key,
      cell: (run) => number(run.metrics?.[key]),
      sort: key,
      width: "104px",
      right: true,
    };
  return {
    id,
    title: key.split(".").at(-1),
    hint: key,
    cell: (run) => setting(run, key),
    sort: key,
    width: "104px",
    right: true,
  };
}

function setting(run, key) {
  const value = run.config?.[key];
  if (value === undefined || value === null) return "–";
  return typeof value === "string" ? value : JSON.stringify(value);
}

function nameCell(run) {
  const name = h("a", { href: runAddress(run.id), tabindex: -1, class: "name", title: run.name }, run.name);
  if (!narrow.matches) return h("span", { class: "named" }, name, tagList(run.tags));
  const loss = run.metrics?.loss;
  const facts = [
    run.step !== null &&
      run.step !== undefined &&
      (run.total_steps ? `${number(run.step)} / ${number(run.total_steps)}` : number(run.step)),
    loss !== undefined && `loss ${number(loss)}`,
    run.user,
  ];
  return h("span", { class: "named two" }, name, h("span", { class: "muted" }, facts.filter(Boolean).join(" · ")));
}

/**
 * Lets the user choose columns, and keeps the choice.
 * @param {string[]} metrics keys that runs have
 * @returns {Promise<boolean>} whether there is a new choice
 */
export async function chooseColumns(metrics) {
  const now = chosenColumns();
  const choice = (id, text) =>
    h(
      "label",
      { class: "choice" },
      h("input", { type: "checkbox", name: "column", value: id, checked: now.includes(id) }),
      ` ${text}`,
    );
  const chosenMetrics = now.filter((id) => id.startsWith("metric:")).map((id) => id.slice(7));
  const keys = [...new Set([...metrics, ...chosenMetrics])].sort();
  const content = [
    h(
      "fieldset",
      {},
      h("legend", {}, "Facts"),
      Object.entries(FACTS).map(([id, { title }]) => choice(id, title)),
    ),
    h(
      "fieldset",
      {},
      h("legend", {}, "Metrics"),
      keys.length ? keys.map((key) => choice(`metric:${key}`, key)) : "no run has metrics yet",
    ),
    h(
      "label",
      { class: "field" },
      "Keys of the configuration, separated by spaces",
      h("input", {
        name: "keys",
        value: chosenKeys().join(" "),
        placeholder: "optimizer.lr model.num_layers",
        autocomplete: "off",
      }),
    ),
  ];
  const { value, form } = await openDialog({
    title: "Columns",
    content,
    buttons: [
      { text: "Back", value: "" },
      { text: "First choice", value: "first" },
      { text: "Show", value: "show", kind: "primary" },
    ],
  });
  if (!value) return false;
  const wanted =
    value === "first"
      ? FIRST
      : [
          ...form.getAll("column"),
          ...form
            .get("keys")
            .split(/[\s,]+/)
            .filter(Boolean)
            .map((key) => `config:${key}`),
        ];
  const order = [...new Set([...now.filter((id) => wanted.includes(id)), ...wanted])];
  localStorage.setItem(STORED, JSON.stringify(order));
  return true;
}
