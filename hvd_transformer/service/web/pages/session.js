// Who is looking at the pages, and what they may do.

import { get, setCsrf } from "./api.js";

/** @type {{owner: string, role: string, version: string, queue: boolean, csrf: string, events: ?string}} */
export let me = { owner: "", role: "view", version: "", queue: false, csrf: "", events: null };

/** Asks the service who we are. Raises ApiError 401 where a login is needed. */
export async function identify() {
  me = await get("me");
  setCsrf(me.csrf);
}

/** Tells whether hosts and tokens may be changed. */
export function isAdmin() {
  return me.role === "admin";
}

/** Tells whether jobs may be submitted, and runs without a job tagged. */
export function maySubmit() {
  return me.role !== "view";
}

/**
 * Tells whether a job may be changed: one's own, or any as admin.
 * @param {?{owner: string}} job
 * @returns {boolean}
 */
export function mayChange(job) {
  return Boolean(job) && (isAdmin() || (me.role === "submit" && job.owner === me.owner));
}
