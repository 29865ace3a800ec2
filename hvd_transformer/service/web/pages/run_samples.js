// Texts that the model wrote at evaluations, the newest first.

import { empty } from "./badges.js";
import { h } from "./dom.js";
import { number } from "./format.js";
import { redraw } from "./morph.js";

/**
 * @param {HTMLElement} panel
 * @param {Object} run
 */
export function show(panel, run) {
  const evaluations = run.samples.toSorted((a, b) => b.step - a.step);
  const field = ([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, h("pre", {}, text)));
  const article = ({ step, samples }) =>
    h(
      "article",
      { class: "sample" },
      h("h3", {}, `Step ${number(step)}`),
      samples.map((sample) => h("dl", {}, Object.entries(sample).map(field))),
    );
  redraw(
    panel,
    evaluations.length
      ? evaluations.map(article)
      : empty("No samples of text. training.text_samples says how many are written at each evaluation."),
  );
}
