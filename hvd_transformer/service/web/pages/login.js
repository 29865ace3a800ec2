// The login: the link that `serve` prints carries a token; without it there is a form.

import { login } from "./api.js";
import { commandBox } from "./dialogs.js";
import { h, replace } from "./dom.js";

const tokenInAddress = () => new URLSearchParams(location.hash.slice(1)).get("token");

/** Whether the address is a link that logs in. */
export const hasToken = () => Boolean(tokenInAddress());

/**
 * Takes a token from the address, logs in with it, and removes it from the address and the history.
 * @returns {Promise<void>}
 */
export async function loginFromAddress() {
  const token = tokenInAddress();
  if (!token) return;
  history.replaceState(null, "", location.pathname + location.search);
  await login(token);
}

/**
 * Shows the form until a token is accepted.
 * @param {HTMLElement} main
 * @param {string} [why]
 * @returns {Promise<void>}
 */
export function showLogin(main, why = "") {
  return new Promise((resolve) => {
    const field = h("input", {
      type: "password",
      id: "token",
      name: "token",
      required: true,
      autocomplete: "current-password",
    });
    const error = h("p", { class: "notice bad", role: "alert", hidden: !why }, why);
    const button = h("button", { type: "submit", class: "primary" }, "Log in");
    const submit = async (event) => {
      event.preventDefault();
      button.disabled = true;
      try {
        await login(field.value.trim());
        resolve();
      } catch (failure) {
        error.textContent = failure.message;
        error.hidden = false;
        button.disabled = false;
        field.select();
      }
    };
    const form = h(
      "form",
      { class: "login", on: { submit } },
      h("h1", {}, "Log in"),
      h("input", { type: "text", autocomplete: "username", hidden: true }),
      h("label", { class: "field" }, "Token", field),
      error,
      button,
      h(
        "p",
        { class: "muted" },
        "hvd-transformer serve prints a link that logs you in. An administrator makes a token with:",
      ),
      commandBox("hvd-transformer token add laptop --owner NAME"),
    );
    main.className = "";
    replace(main, form);
    field.focus();
  });
}
