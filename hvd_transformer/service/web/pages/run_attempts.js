// The starts of a job on a time axis, with the fault that ended each, and the same as a table.

import { empty } from "./badges.js";
import { h } from "./dom.js";
import { duration, number, timeOfDay, when } from "./format.js";
import { listTable } from "./list_table.js";
import { redraw } from "./morph.js";

const TICKS = 4;

/**
 * @param {HTMLElement} panel
 * @param {Object} run
 */
export function show(panel, run) {
  const attempts = run.attempts || [];
  if (!attempts.length) {
    redraw(
      panel,
      empty(
        run.job
          ? "The job has not been started yet."
          : "This run was started outside the queue: the service knows no attempts.",
      ),
    );
    return;
  }
  const columns = [
    { title: "No.", right: true, phone: true, cell: ({ number: no }) => number(no) },
    {
      title: "Outcome",
      phone: true,
      cell: (attempt) =>
        h(
          "span",
          { class: `state ${outcome(attempt).kind}` },
          h("span", { class: "sign", "aria-hidden": "true" }, outcome(attempt).sign),
          outcome(attempt).text,
        ),
    },
    { title: "Hosts", cell: ({ allocation }) => places(allocation) },
    { title: "Began", cell: ({ began }) => when(began) },
    {
      title: "Lasted",
      right: true,
      phone: true,
      cell: ({ began, ended }) => duration((ended ?? Date.now() / 1000) - began),
    },
    { title: "Steps", right: true, cell: steps },
    { title: "Exit code", right: true, cell: ({ code }) => number(code) },
    { title: "Cause", phone: true, cell: ({ cause }) => cause || "–" },
  ];
  redraw(panel, timeline(attempts, run.job), listTable(columns, attempts.toReversed(), { label: "Attempts" }));
}

function places(allocation) {
  return (allocation || [])
    .map(({ host, ranks, gpus }) => `${host}:${ranks}${gpus?.length ? ` (GPU ${gpus.join(", ")})` : ""}`)
    .join("  ");
}

function steps({ first_step: first, last_step: last }) {
  if (first === null) return "–";
  return last === null ? `from ${number(first)}` : `${number(first)} – ${number(last)}`;
}

function outcome({ ended, code, cause }) {
  if (ended === null || ended === undefined) return { kind: "active", sign: "●", text: "Runs" };
  if (code === 0) return { kind: "good", sign: "✓", text: "Done" };
  if (/preempted/i.test(cause)) return { kind: "queued", sign: "↷", text: "Preempted" };
  if (/^(cancelled|held|stopped)/.test(cause)) return { kind: "off", sign: "⊘", text: "Stopped" };
  return { kind: "bad", sign: "✕", text: "Fault" };
}

function timeline(attempts, job) {
  const first = Math.min(job?.submitted ?? Infinity, attempts[0].began);
  const last = Math.max(attempts.at(-1).ended ?? Date.now() / 1000, first + 1);
  const place = (time) => (100 * (time - first)) / (last - first);
  const parts = [];
  let free = first;
  for (const attempt of attempts) {
    const { kind, text } = outcome(attempt);
    const ended = attempt.ended ?? last;
    const title = `Attempt ${attempt.number}: ${text}${attempt.cause ? `, ${attempt.cause}` : ""}`;
    if (attempt.began > free)
      parts.push(piece("waits", place(free), place(attempt.began), `Waited ${duration(attempt.began - free)}`));
    parts.push(piece(kind, place(attempt.began), place(ended), title));
    if (kind === "bad") parts.push(h("span", { class: "fault", title, style: { left: `${place(ended)}%` } }, "▼"));
    free = ended;
  }
  const ticks = Array.from({ length: TICKS }, (_, index) =>
    h("span", {}, timeOfDay(first + ((last - first) * index) / (TICKS - 1))),
  );
  return h(
    "figure",
    { class: "timeline", "aria-label": "Attempts over time" },
    h("div", { class: "pieces" }, parts),
    h("div", { class: "ticks" }, ticks),
  );
}

function piece(kind, from, to, title) {
  return h("span", { class: `piece ${kind}`, title, style: { left: `${from}%`, width: `${to - from}%` } });
}
