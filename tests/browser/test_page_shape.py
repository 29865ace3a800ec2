"""What holds for every page: its weight, its width on a phone, light and dark, names for those who cannot see."""

import hashlib
import re
import time

import pytest

from browser.chromium import DESK, PHONE
from browser.conftest import Visit
from browser.fake_run import run_id
from browser.fake_service import PAGES

pytestmark = pytest.mark.slow

MOST_BYTES = 150_000
ADDRESSES = [
    "/",
    "/queue",
    "/hosts",
    f"/compare?runs={run_id(1)},{run_id(100)},{run_id(103)}",
    f"/runs/{run_id(4)}",
    *(
        f"/runs/{run_id(1)}?tab={tab}"
        for tab in ("curves", "ranks", "attempts", "checkpoints", "log", "config", "samples")
    ),
    f"/runs/{run_id(3)}",
]
_LOADED = """
  return [...performance.getEntriesByType('resource'), ...performance.getEntriesByType('navigation')]
    .map(e => [e.name, e.encodedBodySize]);
"""
_COMPLETE = (
    "return ![...document.querySelectorAll('main .skeleton')].some(e => e.getBoundingClientRect().top < innerHeight)"
)
_SHIFT = """
  window.shift = 0;
  new PerformanceObserver(list => list.getEntries().forEach(e => { if (!e.hadRecentInput) window.shift += e.value; }))
    .observe({ type: 'layout-shift', buffered: true });
"""
# Text whose contrast with what is behind it is below 4.5 : 1 (WCAG AA), by the colours that the browser has computed.
_FAINT = """
  const number = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map(v => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const style = getComputedStyle(e), [r, g, b, a = 1] = number(style.backgroundColor);
      if (style.backgroundImage !== 'none') return null;
      if (a === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.closest('button:disabled, .hidden, .skip')) continue;
    const ground = behind(element), style = getComputedStyle(element);
    if (!ground || !style.color.startsWith('rgb')) continue;
    const [a, b] = [light(number(style.color)), light(ground)].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) found.push(`${contrast.toFixed(1)} ${element.className} ${element.innerText.slice(0, 30)}`);
  }
  return found;
"""
_TOO_WIDE = """
  const scrolls = '.wider, .tabs, .scroller, .command, .hidden, .skip, figure';
  return [...document.querySelectorAll('body *')].filter(e => e.checkVisibility() && !e.closest(scrolls))
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 100));
"""
_NAMELESS = """
  const controls = [...document.querySelectorAll('button, input, select, a[href], [role=tab]')];
  return controls.filter(e => e.checkVisibility()).filter(e => {
    const label = e.labels?.length ? [...e.labels].map(l => l.innerText).join('') : '';
    return !(e.getAttribute('aria-label') || e.innerText?.trim() || label.trim() || e.title);
  }).map(e => e.outerHTML.slice(0, 120));
"""


def _open(visit: Visit, address: str):  # type: ignore[no-untyped-def]
    page = visit(address)
    page.until(lambda: page.text("main") and page.run(_COMPLETE), "the page is complete")
    return page


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_page_loads_more_than_150_kb_or_from_elsewhere(visit: Visit, address: str) -> None:
    page = _open(visit, address)
    loaded: dict[str, int] = {}
    while (now := dict(page.run(_LOADED))) != loaded:  # what is asked for may ask for more
        loaded = now
        time.sleep(0.7)
    assert all(name.startswith("http://127.0.0.1:") for name in loaded)
    assert any(name.endswith("/app.js") for name in loaded) and any("/api/v1/" in name for name in loaded)
    assert sum(loaded.values()) <= MOST_BYTES, sorted(loaded.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_phone_needs_no_scrolling_sideways(visit: Visit, address: str) -> None:
    page = visit("/queue")
    page.screen(PHONE)
    page = _open(visit, address)
    assert page.run("return document.documentElement.scrollWidth") <= PHONE[0]
    assert page.run(_TOO_WIDE) == []
    page.click("#help")
    assert page.run("return document.documentElement.scrollWidth") <= PHONE[0]
    page.button("Close", "dialog").click()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read_and_controls_have_names(visit: Visit, dark: bool) -> None:
    page = visit("/queue")
    page.screen(DESK, dark)
    for address in ADDRESSES:
        page = _open(visit, address)
        assert page.run("return document.documentElement.dataset.theme") == ("dark" if dark else "light")
        assert page.run(_FAINT) == [], address
        assert page.run(_NAMELESS) == [], address


def test_the_switch_of_colours_is_kept_and_goes_back_to_the_system(visit: Visit) -> None:
    page = visit("/hosts")
    page.sees("node1")
    theme = "return document.documentElement.dataset.theme"
    page.click("#theme")
    assert page.run(theme) == "dark"
    page.driver.refresh()
    page.sees("node1")
    assert page.run(theme) == "dark"
    page.press("t")
    assert page.run(theme) == "light"
    page.press("t")
    page.screen(DESK, dark=True)
    page.until(lambda: page.run(theme) == "dark", "as the system")


def test_rows_do_not_move_when_they_arrive(visit: Visit) -> None:
    page = _open(visit, "/")
    page.run(_SHIFT)
    page.run("await new Promise(resolve => setTimeout(resolve, 200))")
    assert page.run("return window.shift") < 0.05


def test_an_unknown_address(visit: Visit) -> None:
    page = visit("/no/such/page")
    page.sees("There is no such page.")


def test_uplot_is_what_its_readme_says() -> None:
    folder = PAGES / "uplot"
    listed = dict(
        re.findall(
            r"^\| `([^`]+)` \|.*`([0-9a-f]{64})` \|$", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    assert set(listed) == {file.name for file in folder.iterdir()} - {"README.md"}
    assert listed == {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in listed}
