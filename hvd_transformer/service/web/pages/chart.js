// One chart: lines over a shared x axis, with values at the cursor and zoom by dragging.

import { chartOptions, loadLibrary, xName, xText } from "./chart_options.js";
import { smooth } from "./curves.js";
import { h, replace } from "./dom.js";
import { number } from "./format.js";

const HEIGHT = { normal: 190, large: 420 };
const AXIS_PIXELS = 72; // beside the plot itself
const MIDDLE = 0.5;

/**
 * @typedef {Object} Line
 * @property {string} label
 * @property {string} colour
 * @property {number[]} dash
 * @property {import("./curves.js").Points} points
 * @property {() => ?number} [last] its newest value
 */

/**
 * @typedef {Object} Look
 * @property {string} x "step" | "seconds" | "samples" | "tokens"
 * @property {?[number, number]} range
 * @property {number} smoothing 0 to below 1
 * @property {boolean} log
 * @property {string} group charts of one group share the cursor
 */

/** A chart with its title. */
export class Chart {
  /**
   * @param {string} title
   * @param {Object} options
   * @param {(range: ?[number, number]) => void} options.onZoom
   * @param {() => void} options.onEnlarge more points fit
   * @param {boolean} options.many values of the lines are beside the cursor, as there is no room for them above the chart
   * @param {AbortSignal} options.signal
   */
  constructor(title, { onZoom, onEnlarge, many, signal }) {
    this.many = many;
    this.onZoom = onZoom;
    this.onEnlarge = onEnlarge;
    this.signal = signal;
    this.lines = [];
    this.values = h("span", { class: "values" });
    this.readout = h("div", { class: "readout", hidden: true });
    this.plot = h("div", { class: "plot" }, h("div", { class: "skeleton" }));
    const props = { type: "button", class: "icon", "aria-label": `Enlarge ${title}`, title: "Enlarge (Enter)" };
    const grow = h("button", { ...props, on: { click: () => this.#enlarge() } }, "⤢");
    const caption = h("figcaption", {}, h("h3", { title }, title), this.values, grow);
    this.element = h("figure", { class: "chart", tabindex: 0, "aria-label": title }, caption, this.plot, this.readout);
    this.element.addEventListener("keydown", (event) => this.#key(event));
    const resized = new ResizeObserver(() => this.#resize());
    resized.observe(this.plot);
    signal.addEventListener("abort", () => {
      resized.disconnect();
      this.#discard();
    });
  }

  /** Pixels that a curve can use; of many lines, which cover each other anyway, two count as one. */
  get width() {
    const pixels = this.plot.clientWidth - AXIS_PIXELS;
    return Math.max(120, Math.round(this.many ? pixels / 2 : pixels));
  }

  /**
   * Draws.
   * @param {Line[]} lines each with points
   * @param {Look} look
   */
  async draw(lines, look) {
    await loadLibrary();
    if (this.signal.aborted) return;
    this.lines = lines;
    this.look = look;
    if (!lines.length) {
      this.#discard();
      replace(this.plot, h("p", { class: "muted" }, look.range ? "No values in this range." : "No values yet."));
      this.showValues();
      return;
    }
    const data = this.#data();
    if (this.uplot && this.shape === this.#shapeNow()) this.uplot.setData(data, false);
    else this.#create(data);
    const [from, to] = look.range || [data[0][0], data[0].at(-1)];
    this.uplot.setScale("x", from === to ? { min: from - 1, max: to + 1 } : { min: from, max: to });
    this.showValues();
  }

  #create(data) {
    this.#discard();
    this.plot.replaceChildren();
    this.shape = this.#shapeNow();
    const options = chartOptions({
      lines: this.lines,
      look: this.look,
      many: this.many,
      ...this.#size(),
      hooks: { setCursor: [() => this.showValues()], setSelect: [(uplot) => this.#selected(uplot)] },
      onReset: () => this.onZoom(null),
    });
    this.uplot = new globalThis.uPlot(options, data, this.plot);
  }

  /** What makes a new uPlot necessary. */
  #shapeNow() {
    const { smoothing, log, x } = this.look;
    const lines = this.lines.map(({ label, colour, dash }) => [label, colour, dash]);
    return JSON.stringify([lines, smoothing > 0, log, x, document.documentElement.dataset.theme]);
  }

  #discard() {
    this.uplot?.destroy();
    this.uplot = null;
  }

  /** uPlot's aligned columns: x, then for each line its values and, with smoothing, their average. */
  #data() {
    const { smoothing, log } = this.look;
    const tables = this.lines.map(({ points: { x, y } }) => {
      const values = log ? y.map((value) => (value > 0 ? value : null)) : y;
      return smoothing ? [x, values, smooth(values, smoothing)] : [x, values];
    });
    return tables.length === 1 ? tables[0] : globalThis.uPlot.join(tables);
  }

  #size() {
    const height = this.element.classList.contains("large") ? HEIGHT.large : HEIGHT.normal;
    return { width: Math.max(100, this.plot.clientWidth), height };
  }

  #resize() {
    if (!this.uplot) return;
    const size = this.#size();
    if (size.width !== this.uplot.width || size.height !== this.uplot.height) this.uplot.setSize(size);
  }

  #enlarge() {
    this.element.classList.toggle("large");
    this.#resize();
    this.onEnlarge();
  }

  #selected(uplot) {
    const { left, width } = uplot.select;
    if (width < 3) return;
    uplot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.onZoom([uplot.posToVal(left, "x"), uplot.posToVal(left + width, "x")]);
  }

  /** Shows what the lines are at the cursor, or at their ends. */
  showValues() {
    if (!this.look) return; // not drawn yet
    const cursor = this.uplot?.cursor;
    const index = cursor?.left >= 0 ? (cursor.idx ?? null) : null;
    const { x } = this.look;
    const place = index !== null && h("span", { class: "muted" }, `${xName(x)} ${xText(x, this.uplot.data[0][index])}`);
    const entries = this.lines.map((line, at) => ({ line, value: this.#valueAt(at, index) }));
    if (this.many) {
      replace(this.values, place);
      this.#showReadout(entries, index);
      return;
    }
    const named = this.lines.length > 1;
    const texts = entries.map(({ line, value }) =>
      h("span", {}, named && [swatch(line), `${line.label} `], h("b", {}, number(value))),
    );
    replace(this.values, texts, place);
  }

  /** The values of many lines, the largest first, beside the cursor of the chart that is looked at. */
  #showReadout(entries, index) {
    this.readout.hidden = index === null || !this.element.matches(":hover, :focus");
    if (this.readout.hidden) return;
    const known = entries.filter(({ value }) => value !== null).sort((a, b) => b.value - a.value);
    const text = ({ line, value }) =>
      h("div", {}, swatch(line), h("span", { class: "label" }, line.label), h("b", {}, number(value)));
    replace(this.readout, known.map(text));
    this.readout.classList.toggle("left", this.uplot.cursor.left > MIDDLE * this.uplot.over.clientWidth);
  }

  /** A line's own value at or just before an index: joined data have holes where another line has its point. */
  #valueAt(line, index) {
    if (index === null) return this.lines[line].last?.() ?? this.lines[line].points.y.at(-1) ?? null;
    const column = this.uplot.data[this.look.smoothing ? 2 * line + 2 : line + 1];
    for (let at = index; at >= 0; at -= 1) if (column[at] !== undefined) return column[at];
    return null;
  }

  #key(event) {
    if (!this.uplot || event.target !== this.element || event.ctrlKey || event.metaKey || event.altKey) return;
    const [x] = this.uplot.data;
    const { min, max } = this.uplot.scales.x;
    const here = this.uplot.cursor.idx ?? x.length - 1;
    const jump = event.shiftKey ? Math.ceil(x.length / 20) : 1;
    const middle = x[here] >= min && x[here] <= max ? x[here] : (min + max) / 2;
    if (event.key === "ArrowLeft") this.#moveCursor(Math.max(0, here - jump));
    else if (event.key === "ArrowRight") this.#moveCursor(Math.min(x.length - 1, here + jump));
    else if (event.key === "+") this.onZoom([middle - (middle - min) / 2, middle + (max - middle) / 2]);
    else if (event.key === "0" || event.key === "Escape") this.onZoom(null);
    else if (event.key === "Enter") this.#enlarge();
    else return;
    event.preventDefault();
  }

  #moveCursor(index) {
    const left = this.uplot.valToPos(this.uplot.data[0][index], "x");
    this.uplot.setCursor({ left, top: MIDDLE * this.uplot.over.clientHeight }, true, true);
  }
}

/**
 * A short piece of a line, as it is drawn.
 * @param {{colour: string, dash: number[]}} line
 * @returns {HTMLElement}
 */
export function swatch({ colour, dash }) {
  const kind = !dash?.length ? "solid" : dash[0] > 4 ? "dashed" : "dotted";
  return h("span", { class: "swatch", "aria-hidden": "true", style: { "border-top": `3px ${kind} ${colour}` } });
}
