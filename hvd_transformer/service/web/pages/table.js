// A table of thousands of rows, of which only those in sight are in the document.

import { button, h, narrow, replace } from "./dom.js";
import { showError } from "./messages.js";
import { become, redraw } from "./morph.js";
import { RowPages } from "./row_pages.js";
import { Selection } from "./selection.js";

const AROUND = 8; // rows drawn above and below those in sight

/**
 * @typedef {Object} Column
 * @property {string} id
 * @property {string} title
 * @property {(row: any) => any} cell what stands there
 * @property {string} [sort] key that the service sorts by
 * @property {string} [width] CSS width; the column without one takes the rest
 * @property {boolean} [right] numbers: right-aligned
 * @property {boolean} [phone] also on narrow screens
 * @property {string} [hint] title of the heading
 */

/** A windowed table with sorting, selection and keys. */
export class Table {
  /**
   * @param {Object} options
   * @param {string} options.label for screen readers
   * @param {Column[]} options.columns
   * @param {(cursor: ?string, limit: number) => Promise<{items: any[], next: ?string, total?: number}>} options.load
   * @param {(page: Object) => void} [options.onPage] told each page of the newest question
   * @param {(row: any) => string} options.key
   * @param {(row: any) => void} [options.onOpen] Enter or a click on a row
   * @param {(key: string) => void} [options.onSort]
   * @param {(rows: any[]) => void} [options.onSelect] gives the table checkboxes
   * @param {() => Node} options.empty what stands there without rows
   * @param {AbortSignal} options.signal
   */
  constructor(options) {
    Object.assign(this, options);
    this.pages = new RowPages(options.load, options.onPage);
    this.chosen = new Selection(options.key, () => this.#selectionChanged());
    this.active = 0;
    this.drawn = new Map();
    this.sortKey = "";
    this.descending = false;
    this.body = h("tbody");
    this.head = h("tr");
    this.groups = h("colgroup");
    this.table = h(
      "table",
      { class: "grid", role: "grid", "aria-label": this.label, "aria-multiselectable": this.onSelect ? "true" : null },
      this.groups,
      h("thead", {}, this.head),
      this.body,
    );
    this.nothing = h("div", { hidden: true });
    this.element = h(
      "div",
      { class: "scroller", tabindex: 0, role: "region", "aria-label": this.label },
      this.table,
      this.nothing,
    );
    this.element.addEventListener("scroll", () => this.#drawSoon(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.#key(event));
    this.body.addEventListener("click", (event) => this.#click(event));
    narrow.addEventListener("change", () => this.setColumns(this.columns), { signal: this.signal });
    const resized = new ResizeObserver(() => this.#drawSoon());
    resized.observe(this.element);
    this.signal.addEventListener("abort", () => resized.disconnect());
    this.setColumns(this.columns);
  }

  /** @param {Column[]} columns */
  setColumns(columns) {
    this.columns = columns;
    this.shown = narrow.matches ? columns.filter(({ phone }) => phone) : columns;
    this.rowHeight = narrow.matches ? 54 : 32;
    const select = this.onSelect ? [h("col", { style: { width: "34px" } })] : [];
    replace(
      this.groups,
      select,
      this.shown.map(({ width }) => h("col", width ? { style: { width } } : {})),
    );
    this.#drawHead();
    this.#clear();
    this.#drawSoon();
  }

  /** Shows by what the rows are sorted. */
  setSort(key, descending) {
    this.sortKey = key;
    this.descending = descending;
    this.#drawHead();
  }

  /** Reads from the beginning: the filter or the order has changed. */
  async restart() {
    this.element.setAttribute("aria-busy", "true");
    try {
      if (!(await this.pages.restart())) return;
    } catch (error) {
      showError(error);
      return;
    }
    this.element.removeAttribute("aria-busy");
    this.active = 0;
    this.element.scrollTop = 0;
    this.#draw();
  }

  /** Reads again what is in sight; the row that the keys are at may move. */
  async refresh() {
    const now = this.pages.rows[this.active];
    const active = now && this.key(now);
    try {
      if (!(await this.pages.refresh(...this.#window()))) return;
    } catch (error) {
      showError(error);
      return;
    }
    const moved = this.pages.rows.findIndex((row) => this.key(row) === active);
    if (moved >= 0) this.active = moved;
    this.chosen.see(this.pages.rows);
    this.#draw();
  }

  /** Unselects everything. */
  clearSelection() {
    this.chosen.set([]);
  }

  /** The rows that are selected. */
  get selection() {
    return this.chosen.rows;
  }

  async #more() {
    try {
      await this.pages.more();
      this.#draw();
    } catch (error) {
      showError(error);
    }
  }

  #window() {
    const from = Math.floor(this.element.scrollTop / this.rowHeight);
    return [Math.max(0, from - AROUND), from + Math.ceil(this.element.clientHeight / this.rowHeight) + AROUND];
  }

  #clear() {
    this.drawn.clear();
    this.body.replaceChildren();
  }

  #drawSoon() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.#draw();
    });
  }

  #draw() {
    const waiting = this.pages.total === null;
    const count = waiting ? Math.ceil(this.element.clientHeight / this.rowHeight) : this.pages.total;
    const [from, wanted] = this.#window();
    const to = Math.min(count, wanted);
    this.nothing.hidden = count > 0;
    this.table.hidden = count === 0;
    this.table.setAttribute("aria-rowcount", String(waiting ? -1 : count + 1));
    if (!count) redraw(this.nothing, this.empty());
    const kept = new Map();
    for (let index = from; index < to; index += 1) kept.set(index, this.#row(index));
    this.drawn = kept;
    const nodes = [spacer(from), ...[...kept.values()].map(({ element }) => element), spacer(count - to)];
    nodes[0].style.height = `${from * this.rowHeight}px`;
    nodes.at(-1).style.height = `${Math.max(0, count - to) * this.rowHeight}px`;
    this.#place(nodes);
    if (!waiting && to > this.pages.rows.length && !this.pages.loading) this.#more();
  }

  /** Puts the rows in place without touching those that are there: they keep focus and hover. */
  #place(nodes) {
    const wanted = new Set(nodes);
    for (const child of [...this.body.children]) if (!wanted.has(child)) child.remove();
    let before = this.body.firstChild;
    for (const node of nodes) {
      if (node === before) before = before.nextSibling;
      else this.body.insertBefore(node, before);
    }
  }

  #row(index) {
    const row = this.pages.rows[index];
    const text = row === undefined ? "" : JSON.stringify(row);
    let drawn = this.drawn.get(index);
    if (!drawn || drawn.text !== text) {
      const element = row === undefined ? this.#skeleton() : this.#cells(row, index);
      // A row that only changes keeps its elements: a click that is under way still arrives.
      if (drawn?.text && text) become(drawn.element, element);
      drawn = { text, element: drawn?.text && text ? drawn.element : element };
    }
    drawn.element.classList.toggle("active", index === this.active);
    if (row !== undefined && this.onSelect) {
      const chosen = this.chosen.has(row);
      drawn.element.setAttribute("aria-selected", String(chosen));
      drawn.element.querySelector("input").checked = chosen;
    }
    return drawn;
  }

  #cells(row, index) {
    const box = h("td", { class: "pick" }, h("input", { type: "checkbox", tabindex: -1, "aria-label": "Select" }));
    const cells = this.shown.map((column) => {
      const content = column.cell(row);
      return h("td", { class: `${column.right ? "right" : ""} ${content === "–" ? "muted" : ""}`.trim() }, content);
    });
    const props = { id: `row-${index}`, "aria-rowindex": index + 2, data: { index } };
    return h("tr", { ...props, style: { height: `${this.rowHeight}px` } }, this.onSelect && box, cells);
  }

  #skeleton() {
    const cells = this.shown.map(() => h("td", {}, h("span", { class: "skeleton" })));
    return h("tr", { class: "wait", style: { height: `${this.rowHeight}px` } }, this.onSelect && h("td"), cells);
  }

  #drawHead() {
    const cells = this.shown.map(({ title, sort, hint, right }) => {
      const sorted = Boolean(sort) && sort === this.sortKey;
      const sign = h("span", { class: "order", "aria-hidden": "true" }, sorted ? (this.descending ? "↓" : "↑") : "");
      const text = right ? [sign, title] : [title, sign];
      const order = sorted ? (this.descending ? "descending" : "ascending") : null;
      const props = { scope: "col", title: hint, class: right ? "right" : "", "aria-sort": order };
      return h(
        "th",
        props,
        sort && this.onSort ? button(text, () => this.onSort(sort), { data: { keep: sort } }) : title,
      );
    });
    const change = ({ target }) => this.chosen.set(target.checked ? this.pages.rows : []);
    const all = h("input", { type: "checkbox", "aria-label": "Select all rows that are loaded", on: { change } });
    redraw(this.head, this.onSelect && h("th", { class: "pick", scope: "col" }, all), cells);
  }

  #click(event) {
    const line = event.target.closest("tr[data-index]");
    if (!line) return;
    const index = Number(line.dataset.index);
    if (event.target.closest(".pick")) {
      const [from, to] = [Math.min(this.active, index), Math.max(this.active, index)];
      if (event.shiftKey) this.chosen.add(this.pages.rows.slice(from, to + 1));
      else this.chosen.toggle(this.pages.rows[index]);
    } else if (!event.target.closest("a, button")) {
      this.onOpen?.(this.pages.rows[index], event);
    }
    this.#activate(index, false);
  }

  #key(event) {
    if (event.target !== this.element || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = Math.max(1, Math.floor(this.element.clientHeight / this.rowHeight) - 2);
    const moves = {
      ArrowDown: 1,
      j: 1,
      ArrowUp: -1,
      k: -1,
      PageDown: step,
      PageUp: -step,
      Home: -this.active,
      End: this.pages.rows.length,
    };
    const active = this.pages.rows[this.active];
    if (event.key in moves) this.#activate(this.active + moves[event.key], true);
    else if (event.key === "Enter" && active) this.onOpen?.(active, event);
    else if ((event.key === " " || event.key === "x") && this.onSelect && active) this.chosen.toggle(active);
    else return;
    event.preventDefault();
  }

  #activate(index, scroll) {
    this.active = Math.max(0, Math.min(this.pages.rows.length - 1, index));
    this.element.setAttribute("aria-activedescendant", `row-${this.active}`);
    if (scroll) {
      const top = this.active * this.rowHeight;
      const height = this.element.clientHeight - this.head.offsetHeight - this.rowHeight;
      if (top < this.element.scrollTop) this.element.scrollTop = top;
      else if (top > this.element.scrollTop + height) this.element.scrollTop = top - height;
    }
    this.#draw();
  }

  #selectionChanged() {
    this.#draw();
    const all = this.head.querySelector("input");
    const count = this.chosen.rows.length;
    if (all) {
      all.checked = count > 0 && count >= this.pages.rows.length;
      all.indeterminate = count > 0 && !all.checked;
    }
    this.onSelect?.(this.chosen.rows);
  }
}

function spacer() {
  return h("tr", { class: "space", "aria-hidden": "true" });
}
