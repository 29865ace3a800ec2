// The filter above the table of runs: a line of words and KEY:VALUE pairs, a state, and "mine".

import { STATE_NAMES, stateName } from "./badges.js";
import { h } from "./dom.js";
import { filterLine, parseFilter } from "./runs_query.js";
import { me } from "./session.js";

const TYPING_MS = 250;

/**
 * @param {import("./runs_query.js").Filter} state is changed
 * @param {() => void} changed
 * @param {AbortSignal} signal
 * @returns {{element: HTMLElement, show: () => void, focus: () => void}} `show`: the state was changed elsewhere
 */
export function filterBar(state, changed, signal) {
  const placeholder = "Filter: text, user:ada, tag:sweep, optimizer.lr:0.001";
  const typing = { type: "search", autocomplete: "off", spellcheck: "false", placeholder };
  const box = h("input", { id: "filter", "aria-label": "Filter", ...typing });
  const options = STATE_NAMES.map((name) => h("option", { value: name }, stateName(name)));
  const states = h("select", { id: "state", "aria-label": "State" }, h("option", { value: "" }, "Any state"), options);
  const mine = h("input", { type: "checkbox", id: "mine" });
  let timer = 0;
  const showMine = () => (mine.checked = Boolean(me.owner) && state.user === me.owner);
  const show = () => {
    box.value = filterLine(state);
    states.value = state.state;
    showMine();
  };
  const typed = () => {
    clearTimeout(timer);
    Object.assign(state, parseFilter(box.value));
    showMine();
    changed();
  };
  box.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(typed, TYPING_MS);
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !box.value) box.blur();
    if (event.key === "Enter") typed();
  });
  states.addEventListener("change", () => {
    state.state = states.value;
    changed();
  });
  mine.addEventListener("change", () => {
    state.user = mine.checked ? me.owner : "";
    show();
    changed();
  });
  signal.addEventListener("abort", () => clearTimeout(timer));
  show();
  const form = { class: "filter", role: "search", on: { submit: (event) => event.preventDefault() } };
  const element = h("form", form, box, states, me.owner && h("label", { class: "choice" }, mine, " Mine"));
  return { element, show, focus: () => box.select() };
}
