// Draws something again without touching what has not changed: focus, selected text and clicks under way survive.

import { append } from "./dom.js";

// They have listeners and states of their own: kept whole or replaced whole.
const CONTROLS = new Set(["A", "BUTTON", "INPUT", "LABEL", "SELECT"]);

/**
 * Makes an element hold these children. A control that is replaced passes the focus on to the one with its `data-keep`.
 * @param {Element} element
 * @param {...(import("./dom.js").Child | import("./dom.js").Child[])} children
 */
export function redraw(element, ...children) {
  const fresh = document.createElement(element.tagName);
  append(fresh, ...children);
  const kept = element.contains(document.activeElement) ? document.activeElement.dataset.keep : null;
  becomeWithin(element, fresh);
  if (kept && !element.contains(document.activeElement)) {
    element.querySelector(`[data-keep="${CSS.escape(kept)}"]`)?.focus();
  }
}

/**
 * Makes an element like another one of the same tag, node by node.
 * @param {Element} element
 * @param {Element} fresh its children may be taken
 */
export function become(element, fresh) {
  const names = new Set([...element.getAttributeNames(), ...fresh.getAttributeNames()]);
  names.delete("style"); // the Content-Security-Policy forbids to set it as an attribute
  for (const name of names) {
    const value = fresh.getAttribute(name);
    if (value === null) element.removeAttribute(name);
    else if (element.getAttribute(name) !== value) element.setAttribute(name, value);
  }
  if (element.style.cssText !== fresh.style.cssText) element.style.cssText = fresh.style.cssText;
  becomeWithin(element, fresh);
}

function becomeWithin(element, fresh) {
  const olds = [...element.childNodes];
  const news = [...fresh.childNodes];
  news.forEach((node, index) => {
    if (index >= olds.length) element.append(node);
    else becomeOne(olds[index], node);
  });
  for (const extra of olds.slice(news.length)) extra.remove();
}

function becomeOne(old, node) {
  if (old.isEqualNode(node)) return;
  if (old.nodeType === Node.ELEMENT_NODE && old.tagName === node.tagName && !CONTROLS.has(old.tagName)) {
    become(old, node);
  } else {
    old.replaceWith(node);
  }
}
