// How uPlot is loaded, and told to draw a chart of ours.

import { h } from "./dom.js";
import { compact, duration } from "./format.js";

const SCRIPT = "/static/uplot/uPlot.iife.min.js";
const SHEET = "/static/uplot/uPlot.min.css";
const NEAR_PIXELS = 16; // a line so close to the cursor stands out

let library = null;

/**
 * Loads uPlot once, with its style: without it a chart does not know where the mouse is.
 * @returns {Promise<any>}
 */
export function loadLibrary() {
  const files = () => [loaded("link", "href", SHEET, { rel: "stylesheet" }), loaded("script", "src", SCRIPT)];
  library ??= Promise.all(files()).catch((error) => {
    library = null; // the next chart tries again
    throw error;
  });
  return library;
}

function loaded(tag, address, file, more = {}) {
  return new Promise((resolve, reject) => {
    const element = h(tag, { ...more, [address]: file, on: { load: resolve, error: () => failed() } });
    const failed = () => {
      element.remove();
      reject(new Error(`The charts could not be loaded: ${file}`));
    };
    document.head.append(element);
  });
}

/**
 * uPlot's options.
 * @param {Object} chart
 * @param {import("./chart.js").Line[]} chart.lines
 * @param {import("./chart.js").Look} chart.look
 * @param {boolean} chart.many the line at the cursor stands out
 * @param {number} chart.width
 * @param {number} chart.height
 * @param {Object} chart.hooks uPlot's
 * @param {() => void} chart.onReset
 * @returns {Object}
 */
export function chartOptions({ lines, look, many, width, height, hooks, onReset }) {
  const css = getComputedStyle(document.documentElement);
  const axis = {
    stroke: css.getPropertyValue("--muted").trim(),
    grid: { stroke: css.getPropertyValue("--grid").trim(), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
    gap: 6,
  };
  const xTick = (tick) => (look.x !== "seconds" && tick >= 1e4 ? compact(tick) : xText(look.x, tick));
  return {
    width,
    height,
    padding: [6, 18, 0, 0],
    legend: { show: false },
    scales: { x: { time: false }, y: look.log ? { distr: 3 } : {} },
    focus: { alpha: many ? 0.25 : 1 },
    cursor: {
      drag: { x: true, y: false, setScale: false },
      sync: { key: look.group, scales: ["x", null], filters: { pub: (type) => type === "mousemove" } },
      focus: { prox: many ? NEAR_PIXELS : -1 },
      bind: { dblclick: () => onReset },
    },
    axes: [
      { ...axis, values: (_, ticks) => ticks.map(xTick), size: 24 },
      { ...axis, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : yText(tick))), size: 54 },
    ],
    series: [{}, ...lines.flatMap((line) => seriesOf(line, look.smoothing > 0))],
    hooks,
  };
}

/** A line; with smoothing the raw values, pale, below their average. */
function seriesOf({ label, colour, dash }, smoothed) {
  const line = { label, stroke: colour, dash, width: 1.5, points: { size: 5, fill: colour } };
  if (!smoothed) return [line];
  return [
    { ...line, width: 1, alpha: 0.3, dash: [], points: { show: false } },
    { ...line, width: 2 },
  ];
}

/**
 * What the x axis counts.
 * @param {string} x
 * @returns {string}
 */
export function xName(x) {
  return { seconds: "at", samples: "samples", tokens: "tokens" }[x] || "step";
}

/**
 * A place on the x axis.
 * @param {string} x
 * @param {number} value
 * @returns {string}
 */
export function xText(x, value) {
  if (x === "seconds") return duration(value);
  return Number.isInteger(value) && Math.abs(value) < 1e7 ? value.toLocaleString("en-US") : compact(value);
}

function yText(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e4) return compact(value);
  return size < 1e-3 ? Number(value.toPrecision(3)).toExponential() : String(Number(value.toPrecision(4)));
}
