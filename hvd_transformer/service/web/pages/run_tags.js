// Changes the tags of runs: a run with a job has those of its job.

import { post } from "./api.js";
import { confirm } from "./dialogs.js";
import { h } from "./dom.js";
import { showDone, showError } from "./messages.js";
import { mayChange, maySubmit } from "./session.js";

/**
 * Tells whether this user may change the tags of a run.
 * @param {Object} run
 * @returns {boolean}
 */
export function mayTag({ job }) {
  return job ? mayChange(job) : maySubmit();
}

/**
 * Asks for the tags of runs and sets them; runs that are not the user's are left out, and failures are shown.
 * @param {Object[]} runs
 * @returns {Promise<boolean>} whether anything was done
 */
export async function tagRuns(runs) {
  const fit = runs.filter(mayTag);
  if (!fit.length) {
    showError(new Error("Tags: none of the selected runs is yours."));
    return false;
  }
  const change = await askTags(fit);
  if (!change) return false;
  const jobs = fit.flatMap(({ job }) => (job ? [job.id] : []));
  const alone = fit.flatMap(({ id, job }) => (job ? [] : [id]));
  const posts = [];
  if (jobs.length) posts.push(post("jobs/bulk", { ids: jobs, action: "tags", ...change }));
  if (alone.length) posts.push(post("runs/tags", { runs: alone, ...change }));
  let changed = 0;
  for (const { value, reason } of await Promise.allSettled(posts)) {
    if (reason) showError(reason);
    changed += value?.done.length ?? 0;
    for (const line of Object.values(value?.errors ?? {})) showError(new Error(line));
  }
  if (changed) showDone(`Tags of ${changed} ${changed === 1 ? "run" : "runs"} changed.`);
  return changed > 0;
}

/**
 * Writes tags as a line that people can change. Those with spaces, commas or quotes are quoted; `""` is a quote in them.
 * @param {string[]} tags
 * @returns {string}
 */
export function tagLine(tags) {
  return tags.map((tag) => (/[\s,"]/.test(tag) ? `"${tag.replaceAll('"', '""')}"` : tag)).join(" ");
}

/**
 * Reads such a line.
 * @param {string} line
 * @returns {string[]}
 */
export function parseTags(line) {
  const tags = [];
  for (const [, quoted, bare] of line.matchAll(/"((?:[^"]|"")*)"|([^\s,"]+)/g)) {
    tags.push(bare ?? quoted.replaceAll('""', '"'));
  }
  return [...new Set(tags.filter(Boolean))];
}

async function askTags(runs) {
  const one = runs.length === 1;
  const common = runs[0].tags.filter((tag) => runs.every(({ tags }) => tags.includes(tag)));
  const field = h(
    "label",
    { class: "field" },
    'Tags, separated by spaces; one with spaces as "in quotes"',
    h("input", { name: "tags", value: tagLine(common), autocomplete: "off" }),
  );
  const title = `Tags of ${one ? runs[0].name : `${runs.length} runs`}`;
  const text = one
    ? "Tags find runs again: filter with tag:NAME."
    : "These tags are on all of them; what you remove is removed from all.";
  const form = await confirm({ title, text, action: "Set tags", more: [field] });
  if (!form) return null;
  const wanted = parseTags(form.get("tags"));
  return { add: wanted.filter((tag) => !common.includes(tag)), remove: common.filter((tag) => !wanted.includes(tag)) };
}
