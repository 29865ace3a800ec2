// A field that finds runs by name and adds one.

import { get } from "./api.js";
import { stateBadge } from "./badges.js";
import { h, replace } from "./dom.js";
import { showError } from "./messages.js";
import { parseFilter } from "./runs_query.js";

/**
 * @param {{chosen: () => string[], onPick: (id: string) => void, signal: AbortSignal}} options
 * @returns {{element: HTMLElement}}
 */
export function runPicker({ chosen, onPick, signal }) {
  const box = h("input", {
    type: "search",
    id: "add-run",
    role: "combobox",
    "aria-label": "Add a run",
    "aria-expanded": "false",
    "aria-controls": "found",
    placeholder: "Add a run: name, tag:sweep, key:value",
    autocomplete: "off",
  });
  const list = h("ul", { id: "found", role: "listbox", class: "found", hidden: true });
  const element = h("div", { class: "picker" }, box, list);
  let items = [];
  let active = 0;
  let timer = 0;
  let turn = 0;

  const close = () => {
    turn += 1; // an answer that is under way opens nothing
    list.hidden = true;
    box.setAttribute("aria-expanded", "false");
  };
  const pick = (run) => {
    box.value = "";
    close();
    onPick(run.id);
  };
  const draw = () => {
    const options = items.map((run, index) =>
      h(
        "li",
        {
          role: "option",
          id: `found-${index}`,
          "aria-selected": String(index === active),
          on: { pointerdown: (event) => event.preventDefault(), click: () => pick(run) },
        },
        h("span", { class: "name" }, run.name),
        stateBadge(run.state),
      ),
    );
    replace(list, options.length ? options : h("li", { class: "muted" }, "No other run matches."));
    list.hidden = false;
    box.setAttribute("aria-expanded", "true");
    box.setAttribute("aria-activedescendant", `found-${active}`);
  };
  const search = async () => {
    turn += 1;
    const mine = turn;
    try {
      const page = await get("runs", { ...parseFilter(box.value), limit: 30 }, signal);
      if (mine !== turn) return;
      items = page.items
        .filter(({ id, step }) => !chosen().includes(id) && step !== null && step !== undefined)
        .slice(0, 10);
      active = 0;
      draw();
    } catch (error) {
      showError(error);
    }
  };
  box.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(search, 200);
  });
  box.addEventListener("focus", search);
  box.addEventListener("blur", close);
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    else if (event.key === "Enter" && !list.hidden && items[active]) pick(items[active]);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      active = Math.max(0, Math.min(items.length - 1, active + (event.key === "ArrowDown" ? 1 : -1)));
      draw();
    } else return;
    event.preventDefault();
  });
  return { element };
}
