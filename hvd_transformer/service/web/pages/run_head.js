// The head of a run's page: name, state, buttons, what must be seen at once, and its most important numbers.

import { ACTIVE, progress, stateBadge, tagList, WAITING } from "./badges.js";
import { button, h } from "./dom.js";
import { compact, duration, number, timeOfDay, when } from "./format.js";
import { ACTIONS, actionsFor, actOn } from "./job_actions.js";
import { metricTitle } from "./metrics.js";
import { redraw } from "./morph.js";
import { go } from "./router.js";
import { mayTag, tagRuns } from "./run_tags.js";

const SHOWN = ["loss", "valid_loss", "valid_perplexity", "valid_bleu", "valid_accuracy", "valid_f1"];
const MOST_SHOWN = 3;

/**
 * Draws it anew.
 * @param {HTMLElement} head
 * @param {Object} run
 * @param {() => void} refresh reads the run again
 */
export function drawHead(head, run, refresh) {
  const act = async (name) => {
    if (await actOn(name, run.job)) refresh();
  };
  const buttons = actionsFor(run.job).map((name) => {
    const props = { data: { action: name, keep: name === "release" ? "hold" : name } };
    return button(ACTIONS[name].text, () => act(name), { ...props, class: ACTIONS[name].danger ? "danger" : "" });
  });
  const tag = async () => {
    if (await tagRuns([run])) refresh();
  };
  if (mayTag(run)) buttons.push(button("Tags", tag, { data: { action: "tags", keep: "tags" } }));
  const compare = button("Compare", () => go(`/compare?runs=${run.id}`));
  const right = h("div", { class: "buttons" }, buttons, compare);
  const space = h("span", { class: "space" });
  const title = h(
    "div",
    { class: "title" },
    h("h1", {}, run.name),
    stateBadge(run.state),
    tagList(run.tags),
    space,
    right,
  );
  const list = facts(run).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
  redraw(head, title, h("div", { class: "notices" }, notices(run)), h("dl", { class: "facts" }, list));
}

/** Lines that must be seen: why it waits, why it failed, who is late. */
function notices(run) {
  const { job } = run;
  const line = (kind, title, ...text) => h("p", { class: `notice ${kind}` }, h("b", {}, title), " ", text);
  const lines = [];
  if (job && WAITING.includes(job.state)) {
    const held = job.state === "HELD";
    const why = job.reason || (held ? "Release puts it into the queue." : "the scheduler has not looked at it yet.");
    const at = job.estimated_start;
    const stop = why.endsWith(".") ? "" : ".";
    lines.push(
      line("wait", held ? "Held." : "Waits:", why, at && [stop, " Estimated start: ", when(at), ` (${timeOfDay(at)}).`]),
    );
  }
  if (job?.state === "STARTING" && job.reason) lines.push(line("wait", "Waits:", job.reason));
  if (job?.stopping) lines.push(line("wait", "Stopping:", job.stopping));
  if (run.state === "FAILED") {
    lines.push(line("bad", "Failed:", job?.reason || run.attempts?.at(-1)?.cause || run.cause || "see the log"));
  }
  if (run.problem) lines.push(line("wait", "Not all can be shown:", run.problem));
  if (run.late) lines.push(line("bad", "Late:", run.late));
  return lines;
}

/** Names and values, the most important first; what is not known is left out. */
function facts(run) {
  const { job, metrics = {}, best } = run;
  const running = ACTIVE.includes(run.state);
  const known = SHOWN.filter((key) => typeof metrics[key] === "number").slice(0, MOST_SHOWN);
  const bestValue =
    typeof best?.value === "number" && h("span", { title: `at step ${number(best.step)}` }, number(best.value));
  const list = [
    ["Step", progress(run.step, run.total_steps, running)],
    ...known.map((key) => [metricTitle(key), number(metrics[key])]),
    [`Best ${metricTitle(best?.metric || "value").toLowerCase()}`, bestValue],
    ["Tokens/s", run.tokens_per_second && compact(run.tokens_per_second)],
    ["Ranks", number(run.world ?? job?.needs.num_ranks)],
    ["Epoch", run.epoch !== null && number(run.epoch)],
    ["Began", run.began && when(run.began)],
    ["Ends", running && run.estimated_end && when(run.estimated_end)],
    ["Lasted", !running && run.began && run.updated && duration(run.updated - run.began)],
    ["User", run.user],
    ["Job", job && `${job.id}`],
    ["Engine", job && job.engine !== "hosts" && job.engine],
    ["Priority", job && number(job.priority)],
    ["Retries", job?.retries && `${job.retries} of ${job.max_retries}`],
  ];
  return list.filter(([, value]) => value);
}
