// The hosts as a map of their slots: who is where, what is free, which hosts are drained or down and why.

import { get, post } from "./api.js";
import { empty } from "./badges.js";
import { commandBox, confirm } from "./dialogs.js";
import { button, h, replace } from "./dom.js";
import { onNews } from "./events.js";
import { hostCard, usedSlots } from "./host_card.js";
import { showDone, showError } from "./messages.js";
import { redraw } from "./morph.js";
import { setTitle } from "./router.js";
import { isAdmin, me } from "./session.js";
import { every, throttle } from "./timing.js";

const REFRESH_MS = 1000;
const LOAD_MS = 10000;
const DONE = { drain: "drained", resume: "takes jobs again", remove: "removed" };

/** @param {import("./router.js").View} view */
export async function open({ main, signal }) {
  setTitle("Hosts");
  const summary = h("span", { class: "count" });
  const map = h("div", { class: "hosts" }, h("div", { class: "host" }, h("span", { class: "skeleton" })));
  const draw = (hosts) => {
    const slots = hosts.reduce((sum, host) => sum + host.slots, 0);
    const used = hosts.reduce((sum, host) => sum + usedSlots(host), 0);
    const count = `${hosts.length} ${hosts.length === 1 ? "host" : "hosts"}`;
    summary.textContent = hosts.length ? `${count}, ${used} of ${slots} slots used` : "";
    const act = (host) => (isAdmin() ? (action) => change(host, action) : null);
    redraw(map, hosts.length ? hosts.map((host) => hostCard(host, act(host))) : noHosts());
  };
  const read = async () => {
    try {
      const { items } = await get("hosts", {}, signal);
      draw(items);
    } catch (error) {
      showError(error);
    }
  };
  const refresh = throttle(read, REFRESH_MS, signal);
  const change = async (host, action) => {
    if (await changeHost(host, action)) refresh();
  };
  const addAndShow = async () => {
    if (await addHosts()) refresh();
  };
  const add = isAdmin() && me.queue && button("Add hosts", addAndShow, { id: "add-hosts" });
  replace(main, h("div", { class: "tools" }, h("h1", {}, "Hosts"), summary, h("span", { class: "space" }), add), map);
  for (const type of ["mouseover", "focusin"]) map.addEventListener(type, ({ target }) => mark(map, target));
  map.addEventListener("mouseleave", () => mark(map, null));
  for (const kind of ["hosts", "job", "resync"]) onNews(kind, refresh, signal);
  every(LOAD_MS, signal, refresh);
  refresh();
}

/** Makes all places of the job at the pointer stand out. */
function mark(map, target) {
  const job = target?.closest("[data-job]")?.dataset.job;
  for (const place of map.querySelectorAll("[data-job]")) {
    place.classList.toggle("same", Boolean(job) && place.dataset.job === job);
  }
}

async function changeHost({ name, used }, action) {
  const busy = used.some(({ job }) => job !== null);
  const going = busy ? "Its jobs go on to their end; no" : "No";
  const questions = {
    drain: { title: `Drain ${name}?`, text: `${going} new job starts here until Resume.`, action: "Drain" },
    remove: {
      title: `Remove ${name}?`,
      text: "The queue forgets this host. hosts add brings it back.",
      action: "Remove",
      danger: true,
    },
  };
  if (questions[action] && !(await confirm(questions[action]))) return false;
  return changed(`hosts/${encodeURIComponent(name)}/${action}`, {}, `Host ${name}: ${DONE[action]}.`);
}

async function addHosts() {
  const input = h("input", { name: "hosts", placeholder: "node1:8,node2:8", required: true, autocomplete: "off" });
  const field = h("label", { class: "field" }, "Hosts and slots", input);
  const text = "As in -H of launch: a name that ssh knows, a colon, the number of slots.";
  const form = await confirm({ title: "Add hosts", text, action: "Add", more: [field] });
  return Boolean(form) && changed("hosts", { hosts: form.get("hosts").trim() }, "Hosts added.");
}

async function changed(path, body, done) {
  try {
    await post(path, body);
  } catch (error) {
    showError(error);
    return false;
  }
  showDone(done);
  return true;
}

function noHosts() {
  if (me.queue)
    return empty("The queue has no hosts yet. Add some:", commandBox("hvd-transformer hosts add node1:8,node2:8"));
  const text = "This service only shows runs. With hosts it has a queue:";
  return empty(text, commandBox("hvd-transformer serve --hostfile hostfiles/two-nodes"));
}
