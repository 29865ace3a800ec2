// The queue: what runs and until when, what waits, why, and when it is expected to start.

import { get } from "./api.js";
import { ACTIVE, empty, progress, runAddress, stateBadge, tagList, WAITING } from "./badges.js";
import { commandBox } from "./dialogs.js";
import { h, replace } from "./dom.js";
import { onNews } from "./events.js";
import { number, when } from "./format.js";
import { ACTIONS, actionsFor, actOn } from "./job_actions.js";
import { listTable } from "./list_table.js";
import { showError } from "./messages.js";
import { redraw } from "./morph.js";
import { setTitle } from "./router.js";
import { me } from "./session.js";
import { throttle } from "./timing.js";

const SHOWN = 200; // waiting jobs; the table of runs has all

/** @param {import("./router.js").View} view */
export async function open({ main, signal }) {
  setTitle("Queue");
  const running = h("section");
  const waiting = h("section");
  replace(main, h("h1", { class: "hidden" }, "Queue"), running, waiting);
  if (!me.queue) {
    replace(
      running,
      empty(
        "This service has no hosts, so it only shows runs. With hosts it has a queue:",
        commandBox("hvd-transformer serve --hostfile hostfiles/two-nodes"),
      ),
    );
    return;
  }
  const read = async () => {
    try {
      const [active, waits] = await Promise.all([
        all(ACTIVE, {}, signal),
        all(WAITING, { sort: "turn", order: "asc" }, signal),
      ]);
      drawRunning(running, active.items, refresh);
      drawWaiting(
        waiting,
        waits.items
          .map(({ job }) => job)
          .filter(Boolean)
          .sort(inOrder),
        waits.total,
        refresh,
      );
    } catch (error) {
      showError(error);
    }
  };
  const refresh = throttle(read, 1000, signal);
  for (const kind of ["job", "hosts", "waits", "resync"]) onNews(kind, refresh, signal);
  const slowly = throttle(read, 5000, signal);
  onNews("run", slowly, signal);
  refresh();
}

async function all(states, order, signal) {
  const pages = await Promise.all(states.map((state) => get("runs", { state, ...order, limit: SHOWN }, signal)));
  return { items: pages.flatMap(({ items }) => items), total: pages.reduce((sum, { total }) => sum + total, 0) };
}

/** As the scheduler starts them: estimates first, then priority, then time; held ones last. */
function inOrder(a, b) {
  const held = (job) => (job.state === "HELD" ? 1 : 0);
  return (
    held(a) - held(b) ||
    (a.estimated_start ?? Infinity) - (b.estimated_start ?? Infinity) ||
    b.priority - a.priority ||
    a.submitted - b.submitted ||
    a.id - b.id
  );
}

function drawRunning(section, runs, refresh) {
  const columns = [
    { title: "Job", right: true, cell: ({ job }) => job?.id ?? "–" },
    { title: "Name", phone: true, cell: (run) => [h("a", { href: runAddress(run.id) }, run.name), tagList(run.tags)] },
    { title: "State", phone: true, cell: ({ state }) => stateBadge(state) },
    { title: "Step", right: true, cell: (run) => progress(run.step, run.total_steps, true) },
    {
      title: "Hosts",
      cell: ({ job }) =>
        (job?.allocation || []).map(({ host, ranks }) => `${host}:${ranks}`).join(" ") || job?.reason || "–",
    },
    { title: "User", cell: ({ user }) => user || "–" },
    { title: "Ends", right: true, phone: true, cell: (run) => when(run.estimated_end) },
    { title: "", cell: ({ job }) => actions(job, refresh) },
  ];
  const nothing = h("p", { class: "muted" }, "No job runs.");
  redraw(
    section,
    h("h2", {}, "Running ", h("span", { class: "count" }, number(runs.length))),
    runs.length ? listTable(columns, runs, { label: "Running jobs" }) : nothing,
  );
}

function drawWaiting(section, jobs, total, refresh) {
  const columns = [
    { title: "Job", right: true, cell: ({ id }) => id },
    { title: "Name", phone: true, cell: (job) => [h("a", { href: runAddress(job.run) }, job.name), tagList(job.tags)] },
    { title: "State", cell: ({ state }) => stateBadge(state) },
    {
      title: "Ranks",
      right: true,
      cell: ({ needs }) =>
        needs.min_ranks < needs.num_ranks ? `${needs.min_ranks} – ${needs.num_ranks}` : number(needs.num_ranks),
    },
    { title: "Priority", right: true, cell: ({ priority }) => number(priority) },
    { title: "User", cell: ({ owner }) => owner },
    {
      title: "Waits for",
      phone: true,
      cell: ({ reason, state }) => h("span", { class: "reason" }, reason || (state === "HELD" ? "release" : "–")),
    },
    { title: "Starts", right: true, phone: true, cell: (job) => when(job.estimated_start) },
    { title: "", cell: (job) => actions(job, refresh) },
  ];
  const nothing = empty(
    "No job waits. Submit one from a shell:",
    commandBox("hvd-transformer submit -np 2 -- --preset tiny"),
  );
  const rest =
    total > jobs.length &&
    h(
      "p",
      { class: "muted" },
      `The first ${SHOWN} of each state; `,
      h("a", { href: "/?state=QUEUED" }, "all waiting jobs"),
    );
  redraw(
    section,
    h("h2", {}, "Waiting ", h("span", { class: "count" }, number(total))),
    jobs.length ? listTable(columns, jobs, { label: "Waiting jobs" }) : nothing,
    rest,
  );
}

function actions(job, refresh) {
  if (!job) return null;
  const act = async (name) => {
    if (await actOn(name, job)) refresh();
  };
  const names = actionsFor(job);
  return h(
    "span",
    { class: "row-actions" },
    names.map((name) =>
      h(
        "button",
        {
          type: "button",
          class: "plain",
          data: { action: `${name}-${job.id}`, keep: `${name === "release" ? "hold" : name}-${job.id}` },
          on: { click: () => act(name) },
        },
        ACTIONS[name].text,
      ),
    ),
  );
}
