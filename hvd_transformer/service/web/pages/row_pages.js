// Rows that are read page by page with cursors, and read again while they change.

const SIZE = 50;

/** The rows read so far. Of reads that overlap, the one for the newest question counts. */
export class RowPages {
  /**
   * @param {(cursor: ?string, limit: number) => Promise<{items: any[], next: ?string, total?: number}>} load
   * @param {(page: Object) => void} [onPage] told each page that counts
   */
  constructor(load, onPage = () => {}) {
    this.load = load;
    this.onPage = onPage;
    this.rows = [];
    this.total = null; // null: nothing has been read
    this.pages = []; // {cursor, start, next} of each page, in order
    this.question = 0;
    this.loading = null; // what is being read: the first page, or more rows
  }

  /**
   * The question has changed: reads the first page of the answer, and only then forgets the old rows.
   * @returns {Promise<boolean>} whether no newer question came meanwhile
   */
  async restart() {
    this.question += 1;
    const { question } = this;
    const reading = this.load(null, SIZE);
    this.loading = reading;
    try {
      const page = await reading;
      if (question !== this.question) return false;
      this.rows = page.items;
      this.pages = [{ cursor: null, start: 0, next: page.next }];
      this.#count(page);
      return true;
    } finally {
      if (question === this.question) this.loading = null;
    }
  }

  /**
   * Reads the next page, if there is one.
   * @returns {?Promise<void>}
   */
  more() {
    const last = this.pages.at(-1);
    if (!last?.next) return null;
    this.loading ??= this.#append(last.next);
    return this.loading;
  }

  /**
   * Reads again the pages that hold some rows; later ones are read again when they are needed.
   * @param {number} from
   * @param {number} to
   * @returns {Promise<boolean>} whether there are rows to draw
   */
  async refresh(from, to) {
    // What is being read may be older than the news. Who began to read is told of a failure.
    while (this.loading) await this.loading.catch(() => {});
    if (!this.pages.length) return false;
    const { question } = this;
    const done = await this.#readAgain(from, to);
    if (question !== this.question) return false;
    return done || this.refresh(from, to); // more rows were read meanwhile
  }

  async #readAgain(from, to) {
    const { question } = this;
    const index = Math.max(
      0,
      this.pages.findLastIndex(({ start }) => start <= from),
    );
    const { start } = this.pages[index];
    const fresh = [];
    const pages = this.pages.slice(0, index);
    let { cursor } = this.pages[index];
    do {
      const page = await this.load(cursor, SIZE);
      if (question !== this.question || this.loading) return false;
      pages.push({ cursor, start: start + fresh.length, next: page.next });
      fresh.push(...page.items);
      this.last = page;
      cursor = page.next;
    } while (cursor && start + fresh.length < to);
    this.rows = [...this.rows.slice(0, start), ...fresh];
    this.pages = pages;
    this.#count(this.last);
    return true;
  }

  async #append(cursor) {
    const { question } = this;
    try {
      const page = await this.load(cursor, SIZE);
      if (question !== this.question) return;
      this.pages.push({ cursor, start: this.rows.length, next: page.next });
      this.rows.push(...page.items);
      this.#count(page);
    } finally {
      if (question === this.question) this.loading = null;
    }
  }

  #count(page) {
    this.total = page.total ?? this.rows.length + (page.next ? SIZE : 0);
    this.onPage(page);
  }
}
