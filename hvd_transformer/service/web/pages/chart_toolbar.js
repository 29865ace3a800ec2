// The controls above the charts: x axis, smoothing, logarithm, zoom.

import { button, h } from "./dom.js";

const AXES = { step: "Step", seconds: "Time", samples: "Samples", tokens: "Tokens" };
const MOST_SMOOTHING = 0.99;

/**
 * Reads how charts look from the address.
 * @param {URLSearchParams} query
 * @returns {Omit<import("./chart.js").Look, "group">}
 */
export function lookFrom(query) {
  const from = Number(query.get("from"));
  const to = Number(query.get("to"));
  return {
    x: query.get("x") in AXES ? query.get("x") : "step",
    range: query.has("from") && query.has("to") && from < to ? [from, to] : null,
    smoothing: Math.min(MOST_SMOOTHING, Math.max(0, Number(query.get("smooth")) || 0)),
    log: query.get("log") === "1",
  };
}

/**
 * Writes it for the address; what is as usual is left out.
 * @param {import("./chart.js").Look} look
 * @returns {Object<string, any>}
 */
export function lookInAddress({ x, range, smoothing, log }) {
  const [from, to] = range || ["", ""];
  return { x: x === "step" ? "" : x, smooth: smoothing || "", log: log ? 1 : "", from, to };
}

/**
 * Makes the controls.
 * @param {string} group name of their radio buttons
 * @param {(change: Partial<import("./chart.js").Look>) => void} set
 * @returns {{element: HTMLElement, show: (look: import("./chart.js").Look) => void}}
 */
export function chartToolbar(group, set) {
  const axes = Object.entries(AXES).map(([value, text]) => {
    const change = () => set({ x: value, range: null });
    return h("label", {}, h("input", { type: "radio", name: group, value, on: { change } }), h("span", {}, text));
  });
  const slide = ({ target }) => set({ smoothing: Number(target.value) });
  const scale = { type: "range", min: 0, max: MOST_SMOOTHING, step: 0.01 };
  const slider = h("input", { id: "smooth", ...scale, on: { input: slide } });
  const amount = h("output", { for: "smooth" });
  const tick = ({ target }) => set({ log: target.checked });
  const log = h("input", { type: "checkbox", id: "log", on: { change: tick } });
  const reset = button("Zoom out", () => set({ range: null }), { id: "reset-zoom", title: "z, or a double click" });
  const element = h(
    "div",
    { class: "tools" },
    h("fieldset", { class: "segments" }, h("legend", { class: "hidden" }, "x axis"), axes),
    h("label", { class: "choice" }, "Smooth ", slider, amount),
    h("label", { class: "choice" }, log, " Log y"),
    reset,
  );
  const show = (look) => {
    for (const { firstChild: input } of axes) input.checked = input.value === look.x;
    slider.value = String(look.smoothing);
    amount.textContent = look.smoothing.toFixed(2);
    log.checked = look.log;
    reset.disabled = !look.range;
  };
  return { element, show };
}
