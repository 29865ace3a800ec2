// Small things that every page shows the same way: a state, tags, progress, a run's link.

import { h } from "./dom.js";
import { number } from "./format.js";

const STATES = {
  HELD: ["‖", "Held", "held"],
  QUEUED: ["○", "Queued", "queued"],
  STARTING: ["◔", "Starting", "active"],
  RUNNING: ["●", "Running", "active"],
  STOPPING: ["◑", "Stopping", "active"],
  SUCCEEDED: ["✓", "Succeeded", "good"],
  FINISHED: ["✓", "Finished", "good"],
  FAILED: ["✕", "Failed", "bad"],
  CANCELLED: ["⊘", "Cancelled", "off"],
  STOPPED: ["■", "Stopped", "off"],
  UNKNOWN: ["?", "Unknown", "off"],
};

/** States in the order of a job's life, for filters. */
export const STATE_NAMES = Object.keys(STATES);

/** States in which a job has slots. */
export const ACTIVE = ["STARTING", "RUNNING", "STOPPING"];

/** States in which a job waits. */
export const WAITING = ["HELD", "QUEUED"];

/**
 * A state as people read it.
 * @param {string} state
 * @returns {string}
 */
export function stateName(state) {
  return STATES[state]?.[1] || state;
}

/**
 * A state: sign, word and colour.
 * @param {string} state
 * @returns {HTMLElement}
 */
export function stateBadge(state) {
  const [sign, text, kind] = STATES[state] || ["?", state, "off"];
  return h("span", { class: `state ${kind}` }, h("span", { class: "sign", "aria-hidden": "true" }, sign), text);
}

/**
 * Tags.
 * @param {string[]} tags
 * @returns {HTMLElement[]}
 */
export function tagList(tags) {
  return (tags || []).map((tag) => h("span", { class: "tag" }, tag));
}

/**
 * Steps done of all, as numbers above a thin bar.
 * @param {?number} step
 * @param {?number} total
 * @param {boolean} [live] it moves
 * @returns {HTMLElement | string}
 */
export function progress(step, total, live = false) {
  if (step === null || step === undefined) return "–";
  const share = total ? Math.min(1, step / total) : 0;
  const text = total ? `${number(step)} / ${number(total)}` : number(step);
  const bar = total && h("span", { class: "track" }, h("span", { style: { width: `${(100 * share).toFixed(1)}%` } }));
  return h(
    "span",
    { class: `progress ${live ? "live" : ""}`, title: total ? `${(100 * share).toFixed(1)} %` : null },
    h("span", {}, text),
    bar,
  );
}

/**
 * The address of a run's page.
 * @param {string} id
 * @returns {string}
 */
export function runAddress(id) {
  return `/runs/${encodeURIComponent(id)}`;
}

/**
 * What stands where there is nothing yet.
 * @param {string} text
 * @param {...Node} more
 * @returns {HTMLElement}
 */
export function empty(text, ...more) {
  return h("div", { class: "empty" }, h("p", {}, text), ...more);
}
