// Many charts under one toolbar: x axis, smoothing, logarithm and zoom are shared, and only charts in sight are read.

import { Chart } from "./chart.js";
import { loadLibrary } from "./chart_options.js";
import { chartToolbar, lookFrom, lookInAddress } from "./chart_toolbar.js";
import { h, replace } from "./dom.js";
import { describeKeys, shortcut } from "./keys.js";
import { showError } from "./messages.js";
import { throttle } from "./timing.js";

const FOLLOW_MS = 500;
const UNREAD_MS = 400; // the service is still reading a long file: each pause is longer than the one before
const LONGEST_UNREAD_MS = 3000;
let groups = 0;

/**
 * @typedef {Object} PlottedLine
 * @property {import("./curves.js").Curves} source
 * @property {string} key
 * @property {string} label
 * @property {() => {colour: string, dash: number[]}} style
 * @property {() => ?number} [last] the newest value: a curve of few points may end before it
 * @property {boolean} [hidden]
 */

/** A grid of charts. */
export class Charts {
  /**
   * @param {Object} options
   * @param {URLSearchParams} options.query holds x, smooth, log, from, to
   * @param {(values: Object<string, any>) => void} options.onLook keeps these values in the address
   * @param {boolean} [options.many] charts have many lines
   * @param {() => void} [options.onRead] curves have been read
   * @param {AbortSignal} options.signal
   */
  constructor({ query, onLook, many = false, onRead = () => {}, signal }) {
    Object.assign(this, { onLook, many, onRead, signal });
    groups += 1;
    this.look = { ...lookFrom(query), group: `charts-${groups}` };
    this.plots = new Map();
    this.seen = new Set();
    this.unreadMs = UNREAD_MS;
    this.tools = chartToolbar(this.look.group, (change) => this.#set(change));
    this.tools.show(this.look);
    this.toolbar = this.tools.element;
    this.grid = h("div", { class: "charts" });
    this.observer = new IntersectionObserver((entries) => this.#sight(entries), { rootMargin: "100px" });
    signal.addEventListener("abort", () => this.observer.disconnect());
    addEventListener("themechange", () => this.#drawAll(), { signal });
    this.followSoon = throttle(() => this.#read(true), FOLLOW_MS, signal);
    shortcut("Charts", "z", "zoom out in all charts", () => this.#set({ range: null }), signal);
    shortcut("Charts", "l", "logarithmic y axis", () => this.#set({ log: !this.look.log }), signal);
    describeKeys("Charts", "← →", "move the cursor of a focused chart, with Shift further", signal);
    describeKeys("Charts", "+ 0", "zoom in at the cursor, zoom out", signal);
    describeKeys("Charts", "Enter", "enlarge the focused chart", signal);
  }

  /**
   * Sets which charts there are; those that stay keep their place and state.
   * @param {{id: string, title: string, lines: PlottedLine[]}[]} plots
   */
  setPlots(plots) {
    const ids = new Set(plots.map(({ id }) => id));
    for (const [id, { chart }] of this.plots) {
      if (ids.has(id)) continue;
      this.observer.unobserve(chart.element);
      chart.element.remove();
      this.plots.delete(id);
      this.seen.delete(id);
    }
    for (const { id, title, lines } of plots) {
      const old = this.plots.get(id);
      if (old) {
        old.lines = lines;
        old.chart.showValues();
        continue;
      }
      const onZoom = (range) => this.#set({ range });
      const chart = new Chart(title, {
        onZoom,
        onEnlarge: () => this.#read(false, [id]),
        many: this.many,
        signal: this.signal,
      });
      chart.element.dataset.plot = id;
      this.plots.set(id, { chart, lines });
      this.observer.observe(chart.element);
    }
    const nodes = plots.map(({ id }) => this.plots.get(id).chart.element);
    if (nodes.some((node, index) => this.grid.children[index] !== node)) replace(this.grid, nodes);
  }

  /** Reads everything in sight anew. */
  reload() {
    return this.#read(false);
  }

  /** A run has new values: reads them soon, unless an older part is looked at. */
  follow() {
    if (!this.look.range) this.followSoon();
  }

  #sight(entries) {
    const fresh = [];
    for (const { target, isIntersecting } of entries) {
      const { plot } = target.dataset;
      if (!isIntersecting) this.seen.delete(plot);
      else if (!this.seen.has(plot) && this.plots.has(plot)) fresh.push(plot);
      if (isIntersecting) this.seen.add(plot);
    }
    if (fresh.length) this.#read(false, fresh);
  }

  async #read(follow, ids = [...this.seen]) {
    const plots = ids.map((id) => this.plots.get(id)).filter(Boolean);
    const wanted = new Map();
    for (const { source, key, hidden } of plots.flatMap(({ lines }) => lines)) {
      if (!hidden) wanted.set(source, (wanted.get(source) || new Set()).add(key));
    }
    const width = Math.max(0, ...plots.map(({ chart }) => chart.width));
    const { look, signal } = this;
    const read = ([source, keys]) => source[follow ? "follow" : "read"]([...keys], look, width, signal);
    try {
      await Promise.all([loadLibrary(), ...[...wanted].map(read)]); // together, not one after the other
    } catch (error) {
      showError(error);
      return;
    }
    if (look.x !== this.look.x || look.range !== this.look.range || signal.aborted) return;
    await Promise.all(plots.map((plot) => this.#draw(plot)));
    this.onRead();
    if ([...wanted.keys()].every(({ complete }) => complete)) this.unreadMs = UNREAD_MS;
    else {
      setTimeout(() => this.followSoon(), this.unreadMs);
      this.unreadMs = Math.min(this.unreadMs * 1.5, LONGEST_UNREAD_MS);
    }
  }

  #drawAll() {
    for (const id of this.seen) if (this.plots.has(id)) this.#draw(this.plots.get(id));
  }

  #draw({ chart, lines }) {
    const drawn = lines.filter(({ source, key, hidden }) => !hidden && source.points.get(key)?.x.length);
    const lineOf = ({ source, key, label, style, last }) => ({
      label,
      ...style(),
      points: source.points.get(key),
      last: this.look.range ? undefined : last,
    });
    return chart.draw(drawn.map(lineOf), this.look);
  }

  #set(change) {
    const before = this.look;
    this.look = { ...before, ...change };
    this.onLook(lookInAddress(this.look));
    this.tools.show(this.look);
    if (before.x !== this.look.x || before.range !== this.look.range) this.#read(false);
    else this.#drawAll();
  }
}
