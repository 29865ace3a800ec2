// What is known of metrics by their names: titles, which belong on one chart, and whether less or more is better.

const TITLES = {
  loss: "Loss",
  perplexity: "Perplexity",
  lr: "Learning rate",
  grad_norm: "Gradient norm",
  tokens_per_second: "Throughput (tokens/s)",
  milliseconds_per_step: "Time per step (ms)",
  mfu: "Model FLOPs utilization (MFU)",
  data_wait_milliseconds: "Waiting for data (ms per step)",
  communication_wait_milliseconds: "Waiting for communication (ms per step)",
  peak_memory_bytes: "Peak memory of the worst rank (bytes)",
  host_cpu_share: "CPU share of a host",
  network_sent_bytes_per_second: "Network: sent (bytes/s per host)",
  network_received_bytes_per_second: "Network: received (bytes/s per host)",
  loss_scale: "Loss scale",
  bleu: "BLEU",
  accuracy: "Accuracy",
  f1: "F1",
};
const ORDER = [
  "loss",
  "perplexity",
  "bleu",
  "accuracy",
  "f1",
  "lr",
  "grad_norm",
  "tokens_per_second",
  "milliseconds_per_step",
  "mfu",
  "data_wait_milliseconds",
  "communication_wait_milliseconds",
  "peak_memory_bytes",
  "host_cpu_share",
  "network_sent_bytes_per_second",
  "network_received_bytes_per_second",
];
const MORE_IS_BETTER = /(^|_)(bleu|chrf|accuracy|f1|precision|recall|mcc|mfu|tokens_per_second|samples_per_second)$/;
// Of an evaluation: as in config/best_metric.py, for the metrics of own tasks too.
const LESS_IS_BETTER = /^(loss|perplexity|.*_loss)$/;
const NO_CURVE = new Set(["step", "epoch", "samples", "tokens", "seconds", "time"]);

/**
 * A metric's title: "Loss", "valid Loss"; an unknown name stays as it is.
 * @param {string} key
 * @returns {string}
 */
export function metricTitle(key) {
  const [, split, base] = /^(?:(valid|test)_)?(.*)$/.exec(key);
  const title = TITLES[base] || base;
  if (!split) return title;
  return `${split[0].toUpperCase()}${split.slice(1)} ${TITLES[base] && title !== "BLEU" && title !== "F1" ? title.toLowerCase() : title}`;
}

/**
 * The charts of one run: a metric and its values on the validation and test data share one.
 * @param {string[]} keys
 * @returns {{title: string, keys: string[]}[]} in the order of interest
 */
export function chartGroups(keys) {
  const groups = new Map();
  for (const key of sorted(keys)) {
    const base = key.replace(/^(valid|test)_/, "");
    if (!groups.has(base)) groups.set(base, []);
    groups.get(base).push(key);
  }
  return [...groups].map(([base, members]) => ({ title: TITLES[base] || base, keys: members }));
}

/**
 * Keys that have curves, in the order of interest.
 * @param {string[]} keys
 * @returns {string[]}
 */
export function sorted(keys) {
  const place = (key) => {
    const index = ORDER.indexOf(key.replace(/^(valid|test)_/, ""));
    return index < 0 ? ORDER.length : index;
  };
  return keys
    .filter((key) => !NO_CURVE.has(key))
    .sort((a, b) => place(a) - place(b) || splitOf(a) - splitOf(b) || a.localeCompare(b));
}

function splitOf(key) {
  return key.startsWith("test_") ? 2 : key.startsWith("valid_") ? 1 : 0;
}

/**
 * The indices of the best values, none where a best makes no sense.
 * @param {string} key
 * @param {(?number)[]} values
 * @returns {Set<number>}
 */
export function best(key, values) {
  const known = values.filter((value) => typeof value === "number" && Number.isFinite(value));
  if (known.length < 2 || /(^|_)(lr|loss_scale|grad_norm)$|^(slow|host_|network_)/.test(key)) return new Set();
  const evaluated = /^(?:valid|test)_(.*)$/.exec(key);
  const more = evaluated ? !LESS_IS_BETTER.test(evaluated[1]) : MORE_IS_BETTER.test(key);
  const wanted = more ? Math.max(...known) : Math.min(...known);
  if (known.every((value) => value === wanted)) return new Set();
  return new Set(values.flatMap((value, index) => (value === wanted ? [index] : [])));
}
