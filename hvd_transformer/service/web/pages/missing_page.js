// What an address shows that no page has.

import { empty } from "./badges.js";
import { h, replace } from "./dom.js";
import { setTitle } from "./router.js";

/** @param {import("./router.js").View} view */
export function open({ main }) {
  setTitle("Not found");
  replace(main, h("h1", {}, "Not found"), empty("There is no such page.", h("a", { href: "/" }, "All runs")));
}
