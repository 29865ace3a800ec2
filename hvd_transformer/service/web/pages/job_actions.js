// What can be done with jobs, when, and the question before something is lost.

import { post } from "./api.js";
import { WAITING, ACTIVE } from "./badges.js";
import { confirm } from "./dialogs.js";
import { h } from "./dom.js";
import { showDone, showError } from "./messages.js";
import { mayChange } from "./session.js";

const OPEN = [...WAITING, ...ACTIVE];

/** Actions by name: the states they are for, and their words. */
export const ACTIONS = {
  cancel: { text: "Cancel", states: OPEN, done: "cancelled", danger: true },
  hold: { text: "Hold", states: ["QUEUED", "STARTING", "RUNNING"], done: "held" },
  release: { text: "Release", states: ["HELD"], done: "released" },
  retry: { text: "Retry", states: ["FAILED", "CANCELLED"], done: "queued again" },
  priority: { text: "Priority", states: OPEN, done: "changed" },
};

/**
 * The names of the actions that this user may do with a job now.
 * @param {?Object} job
 * @returns {string[]}
 */
export function actionsFor(job) {
  if (!mayChange(job)) return [];
  return Object.keys(ACTIONS).filter((name) => ACTIONS[name].states.includes(job.state));
}

/**
 * Does an action with one job, after the question that it needs.
 * @param {string} name
 * @param {Object} job
 * @returns {Promise<boolean>} whether it was done
 */
export async function actOn(name, job) {
  const body = await ask(name, [job]);
  if (!body) return false;
  try {
    await post(`jobs/${job.id}/${name}`, body);
  } catch (error) {
    showError(error);
    return false;
  }
  showDone(`Job ${job.id}: ${ACTIONS[name].done}.`);
  return true;
}

/**
 * Does an action with many jobs: those for which it makes no sense are left out, and failures are shown.
 * @param {string} name not "priority"
 * @param {Object[]} jobs
 * @returns {Promise<boolean>} whether anything was done
 */
export async function actOnMany(name, jobs) {
  const fit = jobs.filter((job) => actionsFor(job).includes(name));
  if (!fit.length) {
    showError(
      new Error(`${ACTIONS[name].text}: none of the selected jobs is in a state for it, or they are not yours.`),
    );
    return false;
  }
  const body = await ask(name, fit);
  if (!body) return false;
  try {
    const { done, errors } = await post("jobs/bulk", { ids: fit.map(({ id }) => id), action: name, ...body });
    if (done.length) showDone(`${done.length} ${done.length === 1 ? "job" : "jobs"} ${ACTIONS[name].done}.`);
    for (const [id, line] of Object.entries(errors)) showError(new Error(`Job ${id}: ${line}`));
    return done.length > 0;
  } catch (error) {
    showError(error);
    return false;
  }
}

async function ask(name, jobs) {
  if (name === "cancel") return askCancel(jobs);
  if (name === "hold") return askHold(jobs);
  if (name === "priority") return askPriority(jobs[0]);
  return {};
}

function called(jobs) {
  return jobs.length === 1 ? `job ${jobs[0].id}, ${jobs[0].name}` : `${jobs.length} jobs`;
}

async function askCancel(jobs) {
  const active = jobs.filter(({ state }) => ACTIVE.includes(state)).length;
  const text = active
    ? `${active === jobs.length ? "" : `${active} of them have ranks that run. `}The ranks save a checkpoint and end; Retry resumes there.`
    : "It leaves the queue; Retry puts it back into its old place.";
  const now = h(
    "label",
    { class: "choice" },
    h("input", { type: "checkbox", name: "now" }),
    " Stop at once: steps since the last checkpoint are lost",
  );
  const form = await confirm({
    title: `Cancel ${called(jobs)}?`,
    text,
    action: "Cancel the job",
    danger: true,
    more: active ? [now] : [],
  });
  return form && { now: form.get("now") === "on" };
}

async function askHold(jobs) {
  const active = jobs.some(({ state }) => ACTIVE.includes(state));
  if (!active) return {};
  const form = await confirm({
    title: `Hold ${called(jobs)}?`,
    text: "The ranks save a checkpoint and end; the slots are free until Release.",
    action: "Hold",
  });
  return form && {};
}

async function askPriority(job) {
  const field = h(
    "label",
    { class: "field" },
    "Priority (higher starts sooner)",
    h("input", { type: "number", name: "priority", value: job.priority, step: 1, required: true }),
  );
  const form = await confirm({
    title: `Priority of job ${job.id}`,
    text: "Jobs of a higher priority start first and may preempt lower ones.",
    action: "Set",
    more: [field],
  });
  return form && { priority: Number(form.get("priority")) };
}
