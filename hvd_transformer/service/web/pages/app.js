// Starts the pages: login, navigation, connection sign, shortcuts.

import { logout } from "./api.js";
import { h, replace } from "./dom.js";
import { connection, onNews, reconnect, startNews } from "./events.js";
import { timeOfDay } from "./format.js";
import { shortcut, showHelp, startKeys } from "./keys.js";
import { hasToken, loginFromAddress, showLogin } from "./login.js";
import { onLoggedOut, showError } from "./messages.js";
import { go, startRouter } from "./router.js";
import { identify, me } from "./session.js";

const LOST_MS = 1500; // shorter interruptions are not shown
const main = document.getElementById("main");

async function start() {
  let refused = "";
  try {
    await loginFromAddress();
  } catch (error) {
    refused = error.message;
  }
  for (;;) {
    try {
      await identify();
      break;
    } catch (error) {
      if (error.status === 401) await showLogin(main, refused);
      else {
        replace(
          main,
          h(
            "div",
            { class: "empty" },
            h("p", {}, error.message),
            h("button", { type: "button", on: { click: () => location.reload() } }, "Try again"),
          ),
        );
        return;
      }
      refused = "";
    }
  }
  showAccount();
  addShortcuts();
  onLoggedOut(() => location.reload());
  onNews("logged-out", () => location.reload());
  onNews("status", showConnection);
  setInterval(showConnection, 1000);
  startNews(me.events);
  startRouter();
}

function addShortcuts() {
  for (const [key, address, name] of [
    ["r", "/", "runs"],
    ["q", "/queue", "queue"],
    ["c", "/compare", "compare"],
    ["h", "/hosts", "hosts"],
  ]) {
    shortcut("Everywhere", `g ${key}`, `go to ${name}`, () => go(address));
  }
  shortcut("Everywhere", "t", "light, dark or as the system", () => document.getElementById("theme").click());
  shortcut("Everywhere", "?", "this list", showHelp);
  document.getElementById("help").addEventListener("click", showHelp);
  startKeys();
}

function showAccount() {
  const leave = async () => {
    try {
      await logout();
      location.reload();
    } catch (error) {
      showError(error);
    }
  };
  const menu = h(
    "div",
    { class: "menu", id: "account-menu", popover: "auto" },
    h(
      "p",
      {},
      h("b", {}, me.owner),
      h(
        "span",
        { class: "muted" },
        `may ${{ view: "look", submit: "look and submit", admin: "do everything" }[me.role] || me.role}`,
      ),
    ),
    h("p", { class: "muted" }, `hvd-transformer ${me.version}`),
    h("button", { type: "button", id: "logout", on: { click: leave } }, "Log out"),
  );
  const button = h(
    "button",
    { type: "button", class: "plain", popovertarget: "account-menu", "aria-label": `Account: ${me.owner}` },
    h("span", { class: "initial", "aria-hidden": "true" }, me.owner.slice(0, 1).toUpperCase()),
    h("span", { class: "owner" }, me.owner),
  );
  replace(document.getElementById("account"), button, menu);
}

function showConnection() {
  const { state, since, retryAt } = connection();
  const sign = document.getElementById("connection");
  const lost = state === "lost" && Date.now() - since > LOST_MS;
  const shown = lost ? "lost" : state === "live" ? "live" : "";
  if (sign.dataset.state !== shown) {
    sign.dataset.state = shown;
    if (shown === "lost")
      replace(
        sign,
        h("span", { class: "text" }),
        h("button", { type: "button", on: { click: reconnect } }, "Retry now"),
      );
    else replace(sign, shown === "live" && h("span", { title: "The page is up to date" }, "Live"));
  }
  if (lost) {
    const seconds = Math.max(0, Math.ceil((retryAt - Date.now()) / 1000));
    sign.firstChild.textContent = `Connection lost at ${timeOfDay(since / 1000)}${seconds ? `, next try in ${seconds} s` : ", trying"} `;
  }
}

// The link that `serve` prints, opened in a tab that shows these pages: the browser loads nothing by itself.
addEventListener("hashchange", () => hasToken() && location.reload());
start();
