// Numbers, sizes and times as people read them.

import { h } from "./dom.js";

const NONE = "–";
const exact = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { weekday: "short", hour: "2-digit", minute: "2-digit" });

/**
 * A measured value with four digits: 2.314, 0.0003, 12,480, 3.1e-5.
 * @param {?number} value
 * @returns {string}
 */
export function number(value) {
  if (value === null || value === undefined) return NONE;
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return String(value);
  if (Number.isInteger(value)) return Math.abs(value) < 1e9 ? value.toLocaleString("en-US") : compact(value);
  const size = Math.abs(value);
  if (size >= 1e6) return compact(value);
  if (size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return value.toPrecision(4);
}

/**
 * A large value with its prefix: 12.3k, 4.56M.
 * @param {?number} value
 * @returns {string}
 */
export function compact(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  const [factor, prefix] =
    size >= 1e12
      ? [1e12, "T"]
      : size >= 1e9
        ? [1e9, "G"]
        : size >= 1e6
          ? [1e6, "M"]
          : size >= 1e3
            ? [1e3, "k"]
            : [1, ""];
  return trim((value / factor).toPrecision(3)) + prefix;
}

function trim(text) {
  return text.includes("e") ? String(Number(text)) : text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/**
 * Bytes: 512 B, 1.5 GiB.
 * @param {?number} value
 * @returns {string}
 */
export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/**
 * Seconds as a length of time: 42 s, 3 min 20 s, 2 h 5 min, 3 d 4 h.
 * @param {?number} seconds
 * @returns {string}
 */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  const total = Math.max(0, Math.round(seconds));
  const parts = [
    [86400, "d"],
    [3600, "h"],
    [60, "min"],
    [1, "s"],
  ];
  const first = parts.findIndex(([size]) => total >= size);
  if (first < 0) return "0 s";
  const words = [];
  let rest = total;
  for (const [size, name] of parts.slice(first, first + 2)) {
    if (rest >= size) words.push(`${Math.floor(rest / size)} ${name}`);
    rest %= size;
  }
  return words.join(" ");
}

/**
 * A time seen from now: "3 min ago", "in 2 h"; a time further away than a week is a date.
 * @param {number} at seconds since the epoch
 * @returns {string}
 */
export function relative(at) {
  const away = at - Date.now() / 1000;
  const size = Math.abs(away);
  if (size < 5) return "now";
  if (size > 7 * 86400) return exact.format(at * 1000).split(",")[0];
  const text =
    size < 60
      ? `${Math.round(size)} s`
      : size < 3600
        ? `${Math.round(size / 60)} min`
        : size < 86400
          ? `${Math.round(size / 3600)} h`
          : `${Math.round(size / 86400)} d`;
  return away > 0 ? `in ${text}` : `${text} ago`;
}

/**
 * A time of the clock: 14:32; on another day with its name.
 * @param {number} at seconds since the epoch
 * @returns {string}
 */
export function timeOfDay(at) {
  const date = new Date(at * 1000);
  return (date.toDateString() === new Date().toDateString() ? clock : day).format(date);
}

/**
 * A relative time that stays right; the exact one appears on hover.
 * @param {?number} at seconds since the epoch
 * @returns {HTMLElement | string}
 */
export function when(at) {
  if (at === null || at === undefined) return NONE;
  const date = new Date(at * 1000);
  return h("time", { datetime: date.toISOString(), title: exact.format(date), data: { at } }, relative(at));
}

setInterval(() => {
  if (document.hidden) return;
  for (const element of document.querySelectorAll("time[data-at]")) {
    const text = relative(Number(element.dataset.at));
    if (element.textContent !== text) element.textContent = text;
  }
}, 5000);
