// Builds elements. Text always becomes text nodes: nothing from the server is ever read as HTML.

/**
 * @typedef {Node | string | number | null | undefined | false} Child
 */

/**
 * Makes an HTML element.
 * @param {string} tag
 * @param {Object<string, any>} [props] attributes; `on`: listeners by event; `style`: CSS properties; `data`: data-*
 * @param {...(Child | Child[])} children
 * @returns {HTMLElement}
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [type, listener] of Object.entries(value)) element.addEventListener(type, listener);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, ...children);
  return element;
}

/**
 * Makes a button.
 * @param {string} text
 * @param {(event: Event) => void} action
 * @param {Object<string, any>} [props] as those of `h`
 * @returns {HTMLElement}
 */
export function button(text, action, props = {}) {
  return h("button", { type: "button", ...props, on: { click: action } }, text);
}

/**
 * Appends nodes and texts; empty ones are left out.
 * @param {Element} element
 * @param {...(Child | Child[])} children
 */
export function append(element, ...children) {
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
}

/**
 * Replaces what an element holds.
 * @param {Element} element
 * @param {...(Child | Child[])} children
 */
export function replace(element, ...children) {
  element.replaceChildren();
  append(element, ...children);
}

/** Tells whether the screen is as narrow as a phone's. */
export const narrow = matchMedia("(max-width: 640px)");
