"""Everything without a mouse, and the focus is always seen."""

from browser.chromium import Browser
from browser.conftest import Visit
from browser.fake_run import run_id
from browser.fake_service import FakeServer

TAB, ENTER, ESCAPE, DOWN, RIGHT, END = "\ue004", "\ue007", "\ue00c", "\ue015", "\ue014", "\ue010"


def _tab_until(page: Browser, script: str, most: int = 80) -> None:
    """Press Tab until the focus is where it should be; on the way there is always an outline."""
    for _ in range(most):
        page.press(TAB)
        focus = page.focus()
        if focus["tag"] not in ("BODY", "HTML") and "scroller" not in focus["cls"]:
            hidden_radio = page.run("return document.activeElement.matches('.segments input')")
            assert hidden_radio or focus["outline"] != "none", focus
        if page.run(f"return Boolean({script})"):
            return
    raise AssertionError(f"not reached with {most} tabs: {script}")


def test_pages_by_two_keys_and_the_list_of_keys(visit: Visit) -> None:
    page = visit()
    page.sees("gpt-small/warmup-2k")
    for key, path, seen in (
        ("q", "/queue", "after job 43, which runs"),
        ("h", "/hosts", "slots used"),
        ("c", "/compare", "Choose runs to compare"),
        ("r", "/", "gpt-small/warmup-2k"),
    ):
        page.press("g" + key)
        page.until(lambda path=path: page.run("return location.pathname") == path, path)
        page.sees(seen)  # the page's own keys are there, too
    page.press("?")
    page.sees("Keyboard shortcuts", "dialog")
    for text in ("go to runs", "filter", "compare what is selected", "light, dark or as the system"):
        assert text in page.text("dialog")
    page.press(ESCAPE)
    page.until(lambda: not page.all("dialog"), "the list is closed")


def test_a_row_is_found_selected_cancelled_and_opened(visit: Visit, service: FakeServer) -> None:
    page = visit("/?text=gpt-medium")
    page.sees("gpt-medium/elastic")
    page.until(lambda: page.focus()["cls"] == "scroller", "the focus in the table")
    page.press(DOWN, " ")
    page.sees("1 selected")
    page.press("k", "x")
    page.sees("2 selected")
    _tab_until(page, "document.activeElement.dataset.action === 'cancel'")
    page.press(ENTER)
    page.sees("Cancel 2 jobs?", "dialog")
    page.press(ESCAPE)
    page.until(lambda: not page.all("dialog"), "the question is closed")
    assert service.state.calls == []
    page.press(ENTER)
    page.sees("Cancel 2 jobs?", "dialog")
    page.press(ENTER)
    page.sees("2 jobs cancelled.", "#messages")
    page.run("document.querySelector('.scroller').focus()")
    page.press(ENTER)
    page.until(lambda: page.run("return location.pathname") in (f"/runs/{run_id(10)}", f"/runs/{run_id(11)}"), "a run")


def test_the_end_of_a_long_table(visit: Visit) -> None:
    page = visit()
    page.sees("gpt-small/warmup-2k")

    def at_end() -> bool:
        page.press(END)
        return "sweep-18/" in page.text("tr.active")

    page.until(at_end, "the last row")


def test_filter_from_the_table_and_back(visit: Visit) -> None:
    page = visit()
    page.sees("gpt-small/warmup-2k")
    page.press("/", "spike")
    page.until(lambda: page.text(".tools .count") == "1 run", "one run")
    page.press("g", "h")  # typed into the field
    assert page.run("return location.pathname") == "/"


def test_tabs_of_a_run_by_numbers_and_arrows(visit: Visit) -> None:
    page = visit(f"/runs/{run_id(1)}")
    page.one("#panel")
    page.press("6")
    page.sees("23 keys")
    page.press("5")
    page.sees("line 5999")
    assert page.run("return document.getElementById('follow').checked")
    page.press("f")
    assert not page.run("return document.getElementById('follow').checked")
    page.run("document.getElementById('tab-log').focus()")
    page.press(RIGHT)
    page.until(lambda: page.focus()["id"] == "tab-config", "the next tab")
    page.press("c")
    page.sees("Cancel job 41", "dialog")
    page.press(ESCAPE)


def test_every_control_of_a_run_is_reached(visit: Visit) -> None:
    page = visit(f"/runs/{run_id(1)}")
    page.one("figure[aria-label=Loss] canvas")
    _tab_until(page, "document.activeElement.dataset.action === 'tags'")
    _tab_until(page, "document.activeElement.id === 'tab-curves'")
    _tab_until(page, "document.activeElement.id === 'smooth'")
    page.press(RIGHT)
    page.until(lambda: page.one("output").text == "0.01", "a little smoothing")
    _tab_until(page, "document.activeElement.matches('figure[aria-label=Loss]')")
    page.press("+")
    page.until(lambda: "from=" in page.driver.current_url, "a closer look")
    page.press("0")
    page.until(lambda: "from=" not in page.driver.current_url, "all of it")


def test_hosts_are_drained(visit: Visit, service: FakeServer) -> None:
    page = visit("/hosts")
    page.sees("node1")
    _tab_until(page, "document.activeElement.dataset.action === 'drain-node2'")
    page.press(ENTER)
    page.sees("Drain node2?", "dialog")
    page.press(ENTER)
    page.until(lambda: service.state.hosts[1]["drained"], "drained")
    page.until(lambda: page.run("return document.activeElement.dataset.action") == "resume-node2", "the focus stays")
