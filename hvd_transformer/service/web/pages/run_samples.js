// Texts that the model wrote during training, the newest first.

import { empty } from "./badges.js";
import { h } from "./dom.js";
import { number } from "./format.js";
import { redraw } from "./morph.js";

/**
 * @param {HTMLElement} panel
 * @param {Object} run
 */
export function show(panel, run) {
  const samples = run.samples.toSorted((a, b) => b.step - a.step);
  const article = ({ step, text }) =>
    h("article", { class: "sample" }, h("h3", {}, `Step ${number(step)}`), h("pre", {}, text));
  redraw(panel, samples.length ? samples.map(article) : empty("This run has written no samples of text."));
}
