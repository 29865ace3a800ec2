"""Chromium as the tests use it: without a screen, with an empty profile, and with words for what people do."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

CHROMIUM, CHROMEDRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
WAIT_SECONDS = 60.0
PHONE, DESK = (360, 740), (1280, 800)
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
)
_Found = TypeVar("_Found")


def missing() -> str | None:
    """Why there is no browser to test with."""
    for program in (CHROMIUM, CHROMEDRIVER):
        if shutil.which(program) is None:
            return f"no {program.name} at {program}"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    return None


class Browser:
    """One window. Elements are named by CSS selectors; every look waits until it finds what it wants."""

    def __init__(self, profile: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service

        options = Options()
        options.binary_location = str(CHROMIUM)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        for option in (*_OPTIONS, f"--user-data-dir={profile}"):
            options.add_argument(option)
        self.driver: Any = webdriver.Chrome(options=options, service=Service(str(CHROMEDRIVER)))

    def quit(self) -> None:
        self.driver.quit()

    def screen(self, size: tuple[int, int], dark: bool = False) -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def forget(self) -> None:
        """Log out, and forget what pages have stored."""
        self.driver.delete_all_cookies()
        self.run("localStorage.clear(); sessionStorage.clear()")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, look: Callable[[], _Found], what: str) -> _Found:
        """Look until something true is found, and return it."""
        from selenium.common.exceptions import StaleElementReferenceException

        end = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                found = look()
            except StaleElementReferenceException:  # drawn anew meanwhile
                found = None
            if found:
                return found
            if time.monotonic() > end:
                raise AssertionError(f"not within {WAIT_SECONDS:.0f} s: {what}\n{self.text('body')[:3000]}")
            time.sleep(0.05)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def one(self, selector: str) -> Any:
        """The first visible element."""
        return self.until(lambda: next((found for found in self.all(selector) if found.is_displayed()), None), selector)

    def button(self, text: str, within: str = "body") -> Any:
        """The first visible button or link with this text."""

        def look() -> Any:
            found = self.all(f"{within} button, {within} a, {within} [role=tab]")
            return next(
                (one for one in found if one.is_displayed() and one.text.split("\n")[0].strip().startswith(text)), None
            )

        return self.until(look, f"a button {text!r} in {within}")

    def text(self, selector: str) -> str:
        """The text of the first element; empty if there is none."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def sees(self, text: str, within: str = "main") -> None:
        """Wait for a text."""
        self.until(lambda: text in self.text(within), f"{text!r} in {within}")

    def sees_not(self, text: str, within: str = "main") -> None:
        self.until(lambda: text not in self.text(within), f"no {text!r} in {within}")

    def click(self, selector: str) -> None:
        """Click the first visible element, which may be drawn anew at any time."""
        from selenium.common.exceptions import WebDriverException

        def try_to() -> bool:
            try:
                self.one(selector).click()
            except WebDriverException:
                return False
            return True

        self.until(try_to, f"a click on {selector}")

    def press(self, *keys: str) -> None:
        """Press keys one after the other, wherever the focus is."""
        from selenium.webdriver import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def focus(self) -> dict[str, Any]:
        """What has the focus: its tag, id, text and outline."""
        return dict(
            self.run(
                "const e = document.activeElement, s = getComputedStyle(e);"
                "return {tag: e.tagName, id: e.id, text: (e.innerText || '').slice(0, 60), cls: e.className,"
                " outline: s.outlineStyle, width: s.outlineWidth, border: s.borderColor}"
            )
        )

    def complaints(self) -> list[str]:
        """What the console has: errors of scripts, refused by the Content-Security-Policy, files that are missing.

        Answers with an error are in it too; those are the tests' own.
        """
        lines = [entry["message"] for entry in self.driver.get_log("browser")]
        return [line for line in lines if "Failed to load resource" not in line or "/static/" in line]
