"""The page of the queue: what runs, what waits, why, and when it starts."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from browser.conftest import Visit
from browser.fake_service import FakeServer


def test_jobs_in_the_order_of_their_starts_with_reasons(visit: Visit) -> None:
    page = visit("/queue")
    page.sees("needs 16 slots, 6 are free; reserved for it from the end of job 43")
    page.sees("after job 43, which runs")
    rows = [row.text for row in page.all("table[aria-label='Waiting jobs'] tbody tr")]
    assert [row.split()[0] for row in rows] == ["45", "49", "50", "46"]  # by start; without an estimate; held
    assert "Waiting 4" in page.text("main")
    assert "in 1 h" in rows[0]
    assert "4 – 8" in rows[1]  # ranks of an elastic job
    running = page.text("table[aria-label='Running jobs']")
    assert "node1:4 node2:4" in running and "in " in running


def test_priority_and_hold_and_release(visit: Visit, service: FakeServer) -> None:
    page = visit("/queue")
    page.click("[data-action=priority-49]")
    field = page.one("dialog input[name=priority]")
    field.clear()
    field.send_keys("7")
    page.button("Set", "dialog").click()
    page.sees("Job 49: changed.", "#messages")
    assert service.state.job(49)["priority"] == 7
    page.click("[data-action=release-46]")
    page.until(lambda: service.state.job(46)["state"] == "QUEUED", "job 46 is queued")
    page.one("[data-action=hold-46]")


def test_a_new_reason_is_shown_when_the_scheduler_has_one(visit: Visit, service: FakeServer) -> None:
    page = visit("/queue")
    page.sees("after job 43, which runs")
    service.state.job(50)["reason"] = "hosts down: node5"
    service.state.emit("waits", {})
    page.sees("hosts down: node5")


def test_without_a_queue_it_says_how_to_get_one(
    visit: Visit, another_service: Callable[..., AbstractContextManager[FakeServer]]
) -> None:
    with another_service(0, False) as server:
        page = visit("/queue", server=server)
        page.sees("hvd-transformer serve --hostfile")
        page.driver.get("about:blank")
