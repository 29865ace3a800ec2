"""The stream of news: one for all tabs, lost and found again, and nothing while nobody looks."""

import pytest

from browser.conftest import Visit
from browser.fake_service import FakeServer

pytestmark = pytest.mark.slow


def test_a_lost_connection_is_shown_and_can_be_retried(visit: Visit, service: FakeServer) -> None:
    page = visit("/hosts")
    page.sees("node1")
    page.sees("Live", "#connection")
    # The page's own next try never comes: only the button brings the connection back.
    page.run("window.timeout = setTimeout; window.setTimeout = (work, ms) => ms < 1000 && window.timeout(work, ms)")
    service.state.down = True
    service.state.close_streams()
    page.sees("Connection lost at", "#connection")
    assert page.text("#messages") == ""  # said once, not by every call
    service.state.hosts[1]["down"] = "happened meanwhile"
    service.state.down = False
    page.button("Retry now", "#connection").click()
    page.sees("Live", "#connection")
    page.run("window.setTimeout = window.timeout")
    page.sees("happened meanwhile")


def test_a_page_that_could_not_be_loaded_comes_with_the_connection(visit: Visit, service: FakeServer) -> None:
    page = visit("/hosts")
    page.sees("node1")
    page.sees("Live", "#connection")
    service.state.down = True
    service.state.close_streams()
    page.press("gq")
    page.sees("The page could not be loaded", "#messages")
    page.sees("Connection lost at", "#connection")
    service.state.down = False
    page.sees("after job 43, which runs")
    page.complaints()  # of the browser, about the connection


def test_the_stream_resumes_after_the_last_event(visit: Visit, service: FakeServer) -> None:
    page = visit("/hosts")
    page.sees("Live", "#connection")
    service.state.emit("hosts", {})
    service.state.emit("hosts", {})
    service.state.close_streams()  # each stream ends with both
    page.until(lambda: service.state.resumed == ["0", "2"], "a Last-Event-ID")


def test_what_happens_between_the_first_read_and_the_stream_is_told(visit: Visit, service: FakeServer) -> None:
    service.state.emit("hosts", {})  # before the page: no news
    service.state.opening.clear()
    page = visit("/hosts")
    page.sees("node1")
    service.state.hosts[1]["down"] = "happened meanwhile"
    service.state.emit("hosts", {})
    service.state.opening.set()
    page.sees("happened meanwhile")
    assert service.state.resumed == ["1"]


def test_a_change_without_a_connection_says_that_nothing_was_done(visit: Visit, service: FakeServer) -> None:
    page = visit("/hosts")
    page.click("[data-action=resume-node4]")
    page.sees("Up", "[data-host=node4]")
    page.sees("Live", "#connection")
    service.state.down = True
    service.state.close_streams()
    page.click("[data-action=drain-node4]")
    page.button("Drain", "dialog").click()
    page.sees("Nothing was changed: no connection to the service.", "#messages")
    page.complaints()  # of the browser, about the connection


def test_one_stream_for_all_tabs_and_another_tab_takes_over(visit: Visit, service: FakeServer) -> None:
    page = visit("/hosts")
    page.sees("Live", "#connection")
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    second = page.driver.current_window_handle
    page.driver.get(f"{service.url}/queue")
    page.sees("Live", "#connection")
    page.until(lambda: len(service.state.streams) == 1, "one stream for two tabs")
    page.driver.switch_to.window(first)
    page.driver.close()
    page.driver.switch_to.window(second)
    page.until(lambda: len(service.state.streams) == 1, "a stream of the tab that is left")
    page.sees("after job 43, which runs")
    service.state.job(50)["reason"] = "news for the second tab"
    service.state.emit("waits", {})
    page.sees("news for the second tab")


def test_a_hidden_page_asks_for_nothing(visit: Visit, service: FakeServer) -> None:
    page = visit("/hosts")
    page.sees("Live", "#connection")
    page.driver.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": False})
    page.run(
        "Object.defineProperty(document, 'hidden', {configurable: true, get: () => window.away});"
        "window.away = true; document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.until(lambda: not service.state.streams, "no stream")
    service.state.hosts[1]["down"] = "happened meanwhile"
    service.state.emit("hosts", {})
    assert "happened meanwhile" not in page.text("main")
    page.run("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
    page.sees("happened meanwhile")
    page.until(lambda: len(service.state.streams) == 1, "the stream again")


def test_an_error_of_the_service_is_one_line_that_counts(visit: Visit, service: FakeServer) -> None:
    service.state.refuse = (503, "the database is locked: another service uses it")
    page = visit("/hosts", token="admin-token")
    page.sees("the database is locked: another service uses it")
    service.state.refuse = None
    page.button("Try again").click()
    page.sees("node1")
    page.sees("Live", "#connection")
    service.state.refuse = (503, "the database is locked: another service uses it")

    def is_counted() -> bool:
        service.state.emit("hosts", {})  # reads are at most one per second
        return "times)" in page.text("#messages")

    page.until(is_counted, "the number of times")
    assert len(page.all(".message")) == 1
