// The log of the launcher or of one rank: its end first, earlier parts on demand, and new lines as they come.

import { get } from "./api.js";
import { ACTIVE } from "./badges.js";
import { h, replace } from "./dom.js";
import { onNews } from "./events.js";
import { bytes } from "./format.js";
import { shortcut } from "./keys.js";
import { showError } from "./messages.js";
import { every, throttle } from "./timing.js";

const PART = 65536;
const MOST_SHOWN = 2 ** 21; // characters; the oldest are dropped while following
const COLOURS = /\u001b\[[0-9;?]*[A-Za-z]/g;

/**
 * @param {HTMLElement} panel
 * @param {Object} run
 * @param {AbortSignal} signal
 */
export function show(panel, run, signal) {
  const place = { rank: "", start: 0, end: 0, size: 0, busy: false, wanted: false, turn: 0 };
  const sizes = new WeakMap(); // bytes of the file that each piece of text was
  const text = h("pre", { class: "log", tabindex: 0, "aria-label": "Log" });
  const size = h("span", { class: "count" });
  const earlier = h("button", { type: "button", id: "earlier", on: { click: () => readEarlier() } }, "Earlier lines");
  const follow = h("input", {
    type: "checkbox",
    id: "follow",
    checked: true,
    on: { change: () => follow.checked && toEnd() },
  });
  const logs = run.logs?.length
    ? run.logs
    : ["launch", ...Array.from({ length: run.world ?? 1 }, (_, rank) => `${rank}`)];
  const hosts = new Map((run.ranks || []).map(({ rank, host }) => [`${rank}`, host]));
  const choice = h(
    "select",
    { id: "rank", "aria-label": "Whose log" },
    logs.map((rank) =>
      h(
        "option",
        { value: rank },
        /^\d+$/.test(rank)
          ? `Rank ${rank}${hosts.get(rank) ? ` on ${hosts.get(rank)}` : ""}`
          : rank === "launch"
            ? "Launcher"
            : rank,
      ),
    ),
  );
  choice.value = logs.includes("launch") ? "launch" : logs[0];
  place.rank = choice.value;
  choice.addEventListener("change", () => {
    place.rank = choice.value;
    restart();
  });

  const toEnd = () => (text.scrollTop = text.scrollHeight);
  const call = (params) => get(`runs/${run.id}/log`, { rank: place.rank, ...params }, signal);
  const add = (part, first) => {
    const node = document.createTextNode(part.text.replace(COLOURS, "").replaceAll("\r", "\n"));
    sizes.set(node, part.next - part.offset);
    if (first) text.prepend(node);
    else text.append(node);
  };
  const showSize = () => {
    earlier.disabled = place.start === 0;
    size.textContent = place.size ? `${bytes(place.size)}${place.start ? `, from ${bytes(place.start)}` : ""}` : "";
  };
  const guarded = async (work) => {
    if (place.busy || signal.aborted) return;
    place.busy = true;
    const { turn } = place;
    try {
      await work(() => turn === place.turn);
    } catch (error) {
      if (turn === place.turn && error.status === 404) replace(text, h("span", { class: "muted" }, "No log yet."));
      else if (turn === place.turn) showError(error);
    } finally {
      if (turn === place.turn) {
        place.busy = false;
        if (place.wanted && place.start) readEarlier();
      }
    }
  };
  const restart = () => {
    place.turn += 1;
    Object.assign(place, { busy: false, wanted: false, start: 0, end: 0, size: 0 });
    return guarded(async (current) => {
      const part = await call({ tail: PART });
      if (!current()) return;
      text.replaceChildren();
      add(part);
      if (!part.text) replace(text, h("span", { class: "muted" }, "The log is empty so far."));
      Object.assign(place, { start: part.offset, end: part.next, size: part.size });
      showSize();
      toEnd();
    });
  };
  const readEarlier = () => {
    place.wanted = place.busy; // new lines are being read: it is done after that
    return guarded(async (current) => {
      // The service knows where lines begin, counted from the end of a log that may have grown meanwhile.
      let offset = place.start;
      for (let tries = 0; tries < 3 && offset >= place.start; tries += 1) {
        const seen = await call({ tail: place.size - place.start + PART, limit: 1 });
        if (!current()) return;
        offset = seen.offset;
        place.size = seen.size;
      }
      if (offset >= place.start) return;
      const part = await call({ offset, limit: place.start - offset });
      if (!current()) return;
      const below = text.scrollHeight - text.scrollTop;
      add(part, true);
      place.start = offset;
      showSize();
      text.scrollTop = text.scrollHeight - below;
    });
  };
  const readNew = () =>
    guarded(async (current) => {
      const part = await call({ offset: place.end, limit: PART });
      if (!current()) return;
      if (part.size < place.end) {
        place.busy = false; // the log was replaced
        await restart();
        return;
      }
      if (part.text) {
        if (place.end === 0) text.replaceChildren();
        add(part);
        drop(text, sizes, place);
      }
      Object.assign(place, { end: part.next, size: part.size });
      showSize();
      if (follow.checked && part.text) toEnd();
      if (part.next < part.size) soon();
    });
  const soon = throttle(readNew, 1000, signal);
  text.addEventListener("scroll", () => {
    const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 30;
    if (!atEnd && follow.checked && text.matches(":hover, :focus")) follow.checked = false;
    if (text.scrollTop === 0 && place.start > 0 && text.matches(":hover, :focus")) readEarlier();
  });
  every(1000, signal, () => follow.checked && ACTIVE.includes(run.state) && soon());
  onNews("run", (news) => news.id === run.id && follow.checked && soon(), signal);
  onNews("resync", soon, signal);
  shortcut("Run", "f", "follow the log", () => follow.click(), signal);
  replace(
    panel,
    h(
      "div",
      { class: "tools" },
      choice,
      h("label", { class: "choice" }, follow, " Follow"),
      earlier,
      h("span", { class: "space" }),
      size,
    ),
    text,
  );
  restart();
}

function drop(text, sizes, place) {
  let length = [...text.childNodes].reduce((sum, node) => sum + node.textContent.length, 0);
  while (length > MOST_SHOWN && text.childNodes.length > 1) {
    const { firstChild } = text;
    length -= firstChild.textContent.length;
    place.start += sizes.get(firstChild) || 0;
    firstChild.remove();
  }
}
