// Which rows of a table are selected, by their keys; they stay selected when they scroll away or change.

/** A selection of rows. */
export class Selection {
  /**
   * @param {(row: any) => string} key
   * @param {() => void} changed
   */
  constructor(key, changed) {
    this.key = key;
    this.changed = changed;
    this.chosen = new Map();
  }

  /** The rows that are selected, as they were last seen. */
  get rows() {
    return [...this.chosen.values()];
  }

  /** Tells whether a row is selected. */
  has(row) {
    return this.chosen.has(this.key(row));
  }

  /** Selects a row, or no longer. */
  toggle(row) {
    if (!this.chosen.delete(this.key(row))) this.chosen.set(this.key(row), row);
    this.changed();
  }

  /** Selects more rows. */
  add(rows) {
    for (const row of rows) this.chosen.set(this.key(row), row);
    this.changed();
  }

  /** Selects these rows alone. */
  set(rows) {
    this.chosen.clear();
    this.add(rows);
  }

  /** Rows have been read again. */
  see(rows) {
    if (!this.chosen.size) return;
    for (const row of rows) if (this.has(row)) this.chosen.set(this.key(row), row);
    this.changed();
  }
}
