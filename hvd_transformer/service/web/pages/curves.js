// The curves of one run as the page has them: read for a range and a width, then continued as the run goes on.

import { get } from "./api.js";

/**
 * @typedef {Object} Points
 * @property {number[]} x
 * @property {(?number)[]} y null: not a number, such as NaN
 */

/** Curves of one run; every key has at most two points per pixel. */
export class Curves {
  /** @param {string} run id of the run */
  constructor(run) {
    this.run = run;
    this.available = [];
    this.lastStep = null;
    this.complete = true; // false: the service is still reading the file
    this.asked = ""; // the part that was asked for last
    /** @type {Map<string, Points>} */
    this.points = new Map();
    /** @type {Map<string, number>} how far along the axis each key has been read: charts are not all read at once */
    this.reached = new Map();
  }

  /**
   * Reads curves whole, or their part in `view.range`.
   * @param {string[]} keys
   * @param {{x: string, range: ?[number, number]}} view
   * @param {number} width pixels
   * @param {AbortSignal} signal
   */
  async read(keys, view, width, signal) {
    if (!keys.length) return;
    const [from, to] = view.range || [null, null];
    const asked = `${view.x} ${from} ${to}`;
    this.asked = asked;
    const answer = await get(`runs/${this.run}/metrics`, { keys: keys.join(","), from, to, width, x: view.x }, signal);
    if (asked !== this.asked) return; // another part was asked for meanwhile
    this.#learn(answer);
    for (const key of keys) this.points.set(key, pointsOf(answer.keys[key]));
    this.#reach(keys, answer, -Infinity);
  }

  /**
   * Reads what has been added; a run that went back to an earlier step is read whole. Curves that have grown beyond two
   * points per pixel are read whole, too.
   * @param {string[]} keys that have been read before
   * @param {{x: string}} view
   * @param {number} width
   * @param {AbortSignal} signal
   */
  async follow(keys, view, width, signal) {
    const have = keys.map((key) => this.points.get(key)).filter(Boolean);
    const from = Math.min(...keys.map((key) => this.reached.get(key) ?? -Infinity));
    if (!Number.isFinite(from) || have.some(({ x }) => x.length > 2.5 * width)) {
      await this.read(keys, { x: view.x, range: null }, width, signal);
      return;
    }
    const before = this.lastStep;
    const { asked } = this;
    const answer = await get(`runs/${this.run}/metrics`, { keys: keys.join(","), from, width, x: view.x }, signal);
    if (asked !== this.asked) return;
    this.#learn(answer);
    if (before !== null && (answer.last_step ?? 0) < before) {
      await this.read(keys, { x: view.x, range: null }, width, signal);
      return;
    }
    for (const key of keys) extend(this.points.get(key), pointsOf(answer.keys[key]));
    this.#reach(keys, answer, from);
  }

  #reach(keys, answer, from) {
    const to = Math.max(from, ...keys.map((key) => answer.keys[key]?.x.at(-1) ?? -Infinity));
    for (const key of keys) this.reached.set(key, to);
  }

  #learn(answer) {
    this.available = answer.available || this.available;
    this.lastStep = answer.last_step ?? this.lastStep;
    this.complete = answer.complete !== false;
  }
}

function pointsOf(curve) {
  return curve ? { x: curve.x, y: curve.y } : { x: [], y: [] };
}

function extend(points, more) {
  const last = points.x.at(-1) ?? -Infinity;
  more.x.forEach((x, index) => {
    if (x <= last) return;
    points.x.push(x);
    points.y.push(more.y[index]);
  });
}

/**
 * An exponential moving average that starts without bias. Gaps stay gaps.
 * @param {(?number)[]} values
 * @param {number} weight 0 to below 1
 * @returns {(?number)[]}
 */
export function smooth(values, weight) {
  let sum = 0;
  let norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = sum * weight + (1 - weight) * value;
    norm = norm * weight + (1 - weight);
    return sum / norm;
  });
}
