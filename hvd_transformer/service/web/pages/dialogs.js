// Modal windows: a question before something is lost, a small form, a command to copy.

import { append, h } from "./dom.js";

/**
 * Opens a window and waits for its end.
 * @param {{title: string, content: Node | Node[], buttons: {text: string, value: string, kind?: string}[]}} options
 *     The last button is the one that Enter presses. Escape gives "".
 * @returns {Promise<{value: string, form: FormData}>}
 */
export function openDialog({ title, content, buttons }) {
  const heading = h("h2", { id: "dialog-title" }, title);
  const form = h("form", { method: "dialog" }, heading);
  const last = buttons[buttons.length - 1];
  append(
    form,
    content,
    h(
      "div",
      { class: "buttons" },
      buttons.map((button) =>
        h(
          "button",
          { type: button === last ? "submit" : "button", value: button.value, class: button.kind || "" },
          button.text,
        ),
      ),
    ),
  );
  const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, form);
  document.body.append(dialog);
  return new Promise((resolve) => {
    const end = (value) => {
      const data = new FormData(form);
      dialog.close();
      dialog.remove();
      resolve({ value, form: data });
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      end((event.submitter || form.querySelector("[type=submit]")).value);
    });
    form.addEventListener("click", (event) => {
      if (event.target.matches(".buttons button[type=button]")) end(event.target.value);
    });
    dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      end("");
    });
    dialog.showModal();
    (
      dialog.querySelector("[autofocus]") ||
      dialog.querySelector("input:not([type=checkbox]), .buttons button:last-child")
    ).focus();
  });
}

/**
 * Asks before something is done.
 * @param {{title: string, text: string, action: string, danger?: boolean, more?: Node[]}} question
 * @returns {Promise<?FormData>} null: not to be done
 */
export async function confirm({ title, text, action, danger = false, more = [] }) {
  const content = [h("p", {}, text), ...more];
  const buttons = [
    { text: "Back", value: "" },
    { text: action, value: "yes", kind: danger ? "danger" : "primary" },
  ];
  const { value, form } = await openDialog({ title, content, buttons });
  return value === "yes" ? form : null;
}

/**
 * Shows commands to copy.
 * @param {string} title
 * @param {{text: string, command: string}[]} entries
 */
export async function showCommands(title, entries) {
  const content = entries.map(({ text, command }) => [h("p", {}, text), commandBox(command)]).flat();
  await openDialog({ title, content, buttons: [{ text: "Close", value: "" }] });
}

/**
 * A command with a button that copies it.
 * @param {string} command
 * @returns {HTMLElement}
 */
export function commandBox(command) {
  return h(
    "div",
    { class: "command" },
    h("code", {}, command),
    copyButton(() => command),
  );
}

/**
 * A button that copies a text and says so.
 * @param {() => string} text
 * @param {string} [label]
 * @returns {HTMLElement}
 */
export function copyButton(text, label = "Copy") {
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select it and press Ctrl+C";
    }
    setTimeout(() => (button.textContent = label), 2000);
  };
  const button = h("button", { type: "button", on: { click: copy } }, label);
  return button;
}
