// One host on the map: its slots with the jobs in them, its GPUs, its load, what is wrong with it, and its buttons.

import { runAddress } from "./badges.js";
import { button, h } from "./dom.js";
import { number } from "./format.js";
import { jobHue } from "./palette.js";

/**
 * @param {Object} host
 * @param {?(action: "drain" | "resume" | "remove") => void} act null: without buttons
 * @returns {HTMLElement}
 */
export function hostCard(host, act) {
  const free = Math.max(0, host.slots - usedSlots(host));
  const slots = [...host.used.map((use) => usedPlace(use, host)), ...Array.from({ length: free }, freeSlot)];
  const header = h(
    "header",
    {},
    h("h2", {}, host.name),
    status(host),
    h("span", { class: "space" }),
    load(host),
    act && buttons(host, act),
  );
  const card = { class: `host ${host.down ? "down" : ""}`, "aria-label": host.name, data: { host: host.name } };
  return h(
    "article",
    card,
    header,
    h("div", { class: "slots", role: "list", "aria-label": `${host.slots} slots` }, slots),
    host.gpus.length > 0 && gpuRow(host),
    host.down && h("p", { class: "finding bad" }, host.down),
    host.findings.map((finding) => h("p", { class: "finding" }, finding)),
  );
}

/**
 * The number of a host's slots that are in use.
 * @param {Object} host
 * @returns {number}
 */
export function usedSlots({ used }) {
  return used.reduce((sum, { ranks }) => sum + ranks, 0);
}

function status({ down, drained }) {
  const [kind, sign, text] = down ? ["bad", "✕", "Down"] : drained ? ["queued", "↧", "Drained"] : ["good", "✓", "Up"];
  return h("span", { class: `state ${kind}` }, h("span", { class: "sign", "aria-hidden": "true" }, sign), text);
}

function freeSlot() {
  return h("span", { class: "slot free", role: "listitem", title: "Free slot" });
}

/** The slots that one job, or a launch outside the queue, has on this host. */
function usedPlace(use, host) {
  const who = use.job === null ? "Not of the queue" : `Job ${use.job}`;
  const gpus = use.gpus.length ? `, GPU ${use.gpus.join(", ")}` : "";
  const props = {
    class: `slot ${colour(use)}`,
    role: "listitem",
    title: `${who}: ${use.name || "?"}, ${use.owner || "unknown user"}, ${use.ranks} of ${host.slots} slots${gpus}`,
    style: { "flex-grow": use.ranks, "--ranks": use.ranks },
  };
  const text = use.job === null ? use.name || "in use" : `${use.job}`;
  const content = [h("b", {}, text), use.job !== null && use.ranks > 1 && h("span", {}, use.name)];
  if (!use.run) return h("span", props, content);
  return h("a", { ...props, href: runAddress(use.run), data: { job: use.job ?? use.run } }, content);
}

function gpuRow(host) {
  const owners = new Map(host.used.flatMap((use) => use.gpus.map((gpu) => [gpu, use])));
  const cells = host.gpus.map((gpu) => {
    const use = owners.get(gpu);
    const who = !use ? "free" : use.job === null ? use.name : `job ${use.job}, ${use.name}`;
    const data = use?.job ? { job: use.job } : {};
    return h("span", { class: `gpu ${use ? colour(use) : "free"}`, title: `GPU ${gpu}: ${who}`, data }, gpu);
  });
  return h("div", { class: "gpus" }, h("span", { class: "muted" }, "GPU"), cells);
}

function colour({ job }) {
  return job === null ? "other" : `hue-${jobHue(job)}`;
}

function load({ load: value, slots, threads }) {
  if (value === null) return h("span", { class: "muted" }, "load –");
  const most = slots * threads;
  const title = most ? `Load average of 1 minute, ${most} CPU threads` : "Load average of 1 minute";
  const bar = h("span", { class: value > most ? "over" : "", style: { width: `${100 * Math.min(1, value / most)}%` } });
  return h("span", { class: "load", title }, most > 0 && h("span", { class: "track" }, bar), `load ${number(value)}`);
}

function buttons(host, act) {
  const { name, drained, used } = host;
  const busy = used.some(({ job }) => job !== null);
  const one = (action, text, props = {}) =>
    button(text, () => act(action), {
      ...props,
      data: { action: `${action}-${name}`, keep: `${action === "resume" ? "drain" : action}-${name}` },
    });
  const remove = !busy && one("remove", "Remove", { class: "plain" });
  return h("span", { class: "buttons" }, drained ? one("resume", "Resume") : one("drain", "Drain"), remove);
}
