// The filter of the table of runs: as a line that people type, as parameters of the service, and in the address.

/**
 * @typedef {Object} Filter
 * @property {string} text
 * @property {string} state
 * @property {string} user
 * @property {string} tag
 * @property {string[]} where KEY:VALUE of the configuration
 */

/**
 * Reads a line such as `user:ada tag:sweep optimizer.lr:0.001 gpt`. Values with spaces are quoted: `data.source:"my text"`.
 * @param {string} line
 * @returns {Omit<Filter, "state">}
 */
export function parseFilter(line) {
  const filter = { text: "", user: "", tag: "", where: [] };
  const words = [];
  for (const [, key, quoted, bare, word] of line.matchAll(/([\w.-]+):(?:"([^"]*)"|(\S+))|(\S+)/g)) {
    const value = quoted ?? bare;
    if (word !== undefined) words.push(word);
    else if (key === "user" || key === "tag") filter[key] = value;
    else filter.where.push(`${key}:${value}`);
  }
  filter.text = words.join(" ");
  return filter;
}

/**
 * Writes a filter as the line that gives it.
 * @param {Filter} filter
 * @returns {string}
 */
export function filterLine({ text, user, tag, where }) {
  const pairs = [user && `user:${user}`, tag && `tag:${tag}`, ...where].filter(Boolean);
  const quote = (pair) => {
    const cut = pair.indexOf(":") + 1;
    return /\s/.test(pair) ? `${pair.slice(0, cut)}"${pair.slice(cut)}"` : pair;
  };
  return [...pairs.map(quote), text].filter(Boolean).join(" ");
}

/**
 * Reads the filter and the order from the address.
 * @param {URLSearchParams} query
 * @returns {Filter & {sort: string, order: string}}
 */
export function fromAddress(query) {
  const one = (key) => query.get(key) || "";
  return {
    text: one("text"),
    state: one("state"),
    user: one("user"),
    tag: one("tag"),
    where: query.getAll("where"),
    sort: one("sort"),
    order: one("order"),
  };
}
