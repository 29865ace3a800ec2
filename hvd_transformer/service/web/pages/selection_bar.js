// What can be done with the rows that are selected in the table of runs.

import { button, h } from "./dom.js";
import { ACTIONS, actOnMany } from "./job_actions.js";
import { go } from "./router.js";
import { mayTag, tagRuns } from "./run_tags.js";
import { maySubmit, me } from "./session.js";

const NAMES = ["cancel", "hold", "release", "retry"];
const MOST_COMPARED = 20;

/**
 * @param {import("./table.js").Table} table
 * @returns {{element: HTMLElement, show: (runs: Object[]) => void, compare: () => void}}
 */
export function selectionBar(table) {
  const jobsOf = (runs) => runs.map(({ job }) => job).filter(Boolean);
  const compare = () => {
    const ids = table.selection.slice(0, MOST_COMPARED).map(({ id }) => id);
    if (ids.length > 1) go(`/compare?runs=${ids.join(",")}`);
  };
  const act = async (name) => {
    if (await actOnMany(name, jobsOf(table.selection))) table.refresh();
  };
  const tag = async () => {
    if (await tagRuns(table.selection)) table.refresh();
  };
  const count = h("span", { class: "count" });
  const compareButton = button("Compare", compare, { class: "primary" });
  const buttons = NAMES.map((name) => button(ACTIONS[name].text, () => act(name), { data: { action: name } }));
  const tagButton = button("Tags", tag, { data: { action: "tags" } });
  const clear = button("Clear", () => table.clearSelection(), { class: "plain" });
  const bar = { class: "selected", hidden: true, role: "toolbar", "aria-label": "Selected runs" };
  const element = h("div", bar, count, compareButton, maySubmit() && [me.queue && buttons, tagButton], clear);
  const show = (runs) => {
    element.hidden = runs.length === 0;
    count.textContent = `${runs.length} selected`;
    compareButton.disabled = runs.length < 2;
    compareButton.title = runs.length > MOST_COMPARED ? `The first ${MOST_COMPARED}` : "";
    tagButton.disabled = !runs.some(mayTag);
    for (const one of buttons) {
      const { states } = ACTIONS[one.dataset.action];
      one.disabled = !jobsOf(runs).some(({ state }) => states.includes(state));
    }
  };
  return { element, show, compare };
}
