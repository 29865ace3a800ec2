// Light or dark, before the first paint: a classic script, because modules run after it.
"use strict";

(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const names = { auto: "as the system", light: "light", dark: "dark" };
  const signs = { auto: "◐", light: "○", dark: "●" };
  let chosen = "auto";
  try {
    chosen = localStorage.getItem("theme") || "auto";
  } catch {
    // Storage may be forbidden; the system's choice stays.
  }

  const apply = () => {
    root.dataset.theme = chosen === "auto" ? (dark.matches ? "dark" : "light") : chosen;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = signs[chosen];
      button.title = `Colours: ${names[chosen]} (t)`;
      button.setAttribute("aria-label", `Colours: ${names[chosen]}`);
    }
    dispatchEvent(new Event("themechange"));
  };

  const next = () => {
    chosen = {
      auto: dark.matches ? "light" : "dark",
      light: dark.matches ? "dark" : "auto",
      dark: dark.matches ? "auto" : "light",
    }[chosen];
    try {
      localStorage.setItem("theme", chosen);
    } catch {
      // Then it lasts for this page only.
    }
    apply();
  };

  apply();
  dark.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", next);
  });
})();
