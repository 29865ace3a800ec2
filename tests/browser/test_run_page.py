"""The page of one run: its head and buttons, curves, ranks, attempts, checkpoints, logs, configuration, samples."""

import time

import pytest

from browser import chromium
from browser.chromium import Browser
from browser.conftest import Visit
from browser.fake_run import SPIKE, run_id
from browser.fake_service import FakeServer

LIVE, SPIKY, FAILED, WAITING, HELD = (f"/runs/{run_id(number)}" for number in range(1, 6))


def _chart(title: str) -> str:
    return f"figure[aria-label='{title}']"


def _value(page: Browser, title: str) -> float:
    """The first number that stands beside the title of a chart."""
    return float(page.text(f"{_chart(title)} .values b").replace(",", ""))


def _drawn(page: Browser, title: str) -> None:
    page.one(f"{_chart(title)} canvas")


def test_the_head_says_what_matters(visit: Visit) -> None:
    page = visit(LIVE)
    page.sees("rank 3 on host node1: 1.8 times the work of the others")
    head = page.text(".run-head")
    for part in (
        "gpt-small/warmup-2k",
        "Running",
        "baseline",
        "/ 2,000",
        "Valid loss",
        "Tokens/s",
        "Job",
        "41",
        "1 of 3",
        "in ",
    ):
        assert part in head


def test_a_waiting_job_says_why_and_when(visit: Visit) -> None:
    page = visit(WAITING)
    page.sees("needs 16 slots, 6 are free; reserved for it from the end of job 43")
    page.sees("Estimated start: in 1 h")
    assert page.one("#tab-config").get_attribute("aria-selected") == "true"
    page.click("#tab-curves")
    page.sees("Curves appear when the job runs.")


def test_a_job_that_waits_in_slurm(visit: Visit, service: FakeServer) -> None:
    service.state.job(47).update(engine="slurm", allocation=[], reason="Slurm job 12: Resources")
    page = visit(f"/runs/{run_id(6)}")
    page.sees("Slurm job 12: Resources", ".run-head .notices")
    assert "Engine" in page.text(".run-head .facts") and "slurm" in page.text(".run-head .facts")
    page = visit("/queue")
    page.sees("Slurm job 12: Resources", "table[aria-label='Running jobs']")


def test_curves_of_every_metric_and_their_last_values(visit: Visit, service: FakeServer) -> None:
    page = visit(LIVE)
    for title in ("Loss", "Perplexity", "Learning rate", "Gradient norm", "Throughput (tokens/s)"):
        _drawn(page, title)
    run = service.state.runs[0]
    loss = _value(page, "Loss")
    last = run.last_step(time.time()) or 0
    near = [run.value("loss", step) for step in range(last - 200, last + 1)]
    assert any(abs(loss - (value or 0.0)) < 0.001 for value in near)
    assert "valid" in page.text(f"{_chart('Loss')} .values")


def test_curves_grow_with_the_run(visit: Visit, service: FakeServer) -> None:
    page = visit(LIVE)
    _drawn(page, "Learning rate")
    page.sees("Live", "#connection")  # news before that is told to nobody
    run = service.state.runs[0]
    before = page.text(".facts dd")
    run.step, run.speed, run.extra_steps = (run.last_step(time.time()) or 0) + 150, 0.0, 0
    service.state.emit("run", {"id": run.id, "step": run.step})
    page.until(lambda: page.text(".facts dd") != before, "a new step in the head")
    rate = run.value("lr", run.step) or 0.0
    page.until(lambda: abs(_value(page, "Learning rate") - rate) < 0.01 * rate, "a new point of the curve")


def test_newest_values_follow_though_the_head_comes_after_the_curves(visit: Visit, service: FakeServer) -> None:
    page = visit(LIVE)
    _drawn(page, "Learning rate")
    page.sees("Live", "#connection")
    run = service.state.runs[0]
    service.state.head_seconds = 1.5
    run.step, run.speed, run.extra_steps = 1500, 0.0, 0
    service.state.emit("run", {"id": run.id, "step": 1500})
    rate = run.value("lr", 1500) or 0.0
    page.until(lambda: abs(_value(page, "Learning rate") - rate) < 0.01 * rate, "the value at step 1500")


def test_a_run_that_goes_back_is_read_anew(visit: Visit, service: FakeServer) -> None:
    page = visit(LIVE)
    _drawn(page, "Learning rate")
    page.sees("Live", "#connection")
    run = service.state.runs[0]
    run.step, run.speed, run.extra_steps = 300, 0.0, 0
    service.state.emit("run", {"id": run.id, "step": 300})
    rate = run.value("lr", 300) or 0.0
    page.until(lambda: abs(_value(page, "Learning rate") - rate) < 0.01 * rate, "the curve ends at step 300")


def test_a_long_file_that_is_still_being_read_is_asked_for_again(visit: Visit, service: FakeServer) -> None:
    run = service.state.runs[8]
    run.total_steps = run.step = 4000
    service.state.unread = 3
    page = visit(f"/runs/{run.id}")
    _drawn(page, "Learning rate")
    page.until(lambda: service.state.unread == 0, "asked until it is complete")
    page.run("document.querySelector(arguments[0]).focus()", _chart("Learning rate"))

    def at_the_end() -> bool:
        page.press("\ue014")  # right
        return "step 4,000" in page.text(f"{_chart('Learning rate')} .values")

    page.until(at_the_end, "the curve to its last step")


def test_a_spike_of_one_step_in_a_hundred_thousand_is_seen(visit: Visit) -> None:
    page = visit(SPIKY)
    _drawn(page, "Loss")
    red = """
      const plot = document.querySelector(arguments[0]);
      const canvas = plot.querySelector('canvas');
      const { width, height } = canvas;
      const data = canvas.getContext('2d').getImageData(0, 0, width, Math.round(height * 0.5)).data;
      let found = 0;
      for (let place = 0; place < data.length; place += 4)
        if (data[place + 3] > 100 && data[place + 2] > 120 && data[place] < 60) found += 1;
      return found;
    """
    # The loss is below 10 everywhere else: what is drawn in its colour in the upper half is the spike.
    page.until(lambda: page.run(red, _chart("Loss")) > 20, f"a line up to {SPIKE}")


def test_zoom_by_dragging_goes_for_all_charts_and_back(visit: Visit) -> None:
    from selenium.webdriver import ActionChains

    page = visit(SPIKY)
    _drawn(page, "Loss")
    _drawn(page, "Learning rate")
    plot = page.one(f"{_chart('Loss')} .u-over")
    ActionChains(page.driver).move_to_element_with_offset(plot, -60, 0).click_and_hold().move_by_offset(
        80, 0
    ).release().perform()
    page.until(lambda: "from=" in page.driver.current_url, "the range in the address")
    query = dict(pair.split("=") for pair in page.driver.current_url.partition("?")[2].split("&"))
    assert 0 < float(query["from"]) < float(query["to"]) < 100_000
    shared = page.driver.current_url
    page.until(lambda: page.one("#reset-zoom").is_enabled(), "zoom out is possible")
    page.press("z")
    page.until(lambda: "from=" not in page.driver.current_url, "zoomed out")
    page.driver.get(shared)
    _drawn(page, "Loss")
    page.click("#reset-zoom")
    page.until(lambda: "from=" not in page.driver.current_url, "zoomed out")


def test_x_axis_smoothing_and_logarithm_are_kept_in_the_address(visit: Visit) -> None:
    page = visit(LIVE)
    _drawn(page, "Loss")
    page.run("const s = document.getElementById('smooth'); s.value = 0.9; s.dispatchEvent(new Event('input'))")
    page.click("#log")
    page.run("document.querySelector('.segments input[value=tokens]').click()")
    page.until(
        lambda: all(part in page.driver.current_url for part in ("smooth=0.9", "log=1", "x=tokens")),
        "the look in the address",
    )
    page.driver.refresh()
    _drawn(page, "Loss")
    assert page.one("output").text == "0.90"
    assert page.run("return document.querySelector('.segments input[value=tokens]').checked")


def test_the_cursor_moves_with_the_keys_and_tells_values(visit: Visit) -> None:
    page = visit(LIVE)
    _drawn(page, "Loss")
    page.run("document.querySelector(arguments[0]).focus()", _chart("Loss"))
    page.press("\ue012", "\ue012")  # left
    page.until(lambda: "step " in page.text(f"{_chart('Loss')} .values"), "the step at the cursor")
    page.until(lambda: "step " in page.text(f"{_chart('Learning rate')} .values"), "the same cursor on another chart")


def test_ranks_and_the_late_one(visit: Visit) -> None:
    page = visit(f"{LIVE}?tab=ranks")
    page.until(lambda: len(page.all("table tbody tr")) == 8, "eight ranks")
    late = page.text("tr.late")
    for part in ("3", "node1", "late", "backward", "61.0 GiB", "324 ms 1.80×", "2.81k"):
        assert part in late
    bars = page.run("return [...document.querySelectorAll('td:nth-child(6) .track span')].map(bar => bar.style.width)")
    assert [round(float(width.rstrip("%"))) for width in bars] == [56, 56, 56, 100, 56, 56, 56, 56]
    assert "waits for bucket 4" in page.text("table tbody tr")


def test_attempts_and_faults_over_time(visit: Visit) -> None:
    page = visit(f"{LIVE}?tab=attempts")
    page.sees("lost host node5: no heartbeat for 30 s")
    rows = [row.text for row in page.all("table tbody tr")]
    assert len(rows) == 3 and "Runs" in rows[0] and "75" in rows[1] and "0 – 412" in rows[2]
    assert len(page.all(".piece.bad")) == len(page.all(".fault")) == 2
    assert len(page.all(".piece.active")) == 1


def test_checkpoints_and_the_best_one(visit: Visit) -> None:
    page = visit(f"{LIVE}?tab=checkpoints")
    page.sees("1.4 GiB")
    assert "best" in page.text("table tbody tr") and "latest" in page.text("table tbody tr")
    page.sees("hvd-transformer generate /data/runs/gpt-small/warmup-2k")


def _until_other(page: Browser, size: str) -> None:
    page.until(lambda: page.text(".tools .count") != size, "another part of the log")


def test_logs_of_any_rank_follow_and_go_back(visit: Visit, service: FakeServer) -> None:
    page = visit(f"{LIVE}?tab=log")
    page.sees("line 5999: step 5999", ".log")
    assert "\x1b" not in page.text(".log")
    service.state.log_text += "a new line at the end\n"
    page.sees("a new line at the end", ".log")
    at_end = (
        "const log = document.querySelector('.log'); return log.scrollHeight - log.scrollTop - log.clientHeight < 40"
    )
    page.until(lambda: page.run(at_end), "the end of the log")
    for _ in range(6):
        if page.one("#earlier").is_enabled():
            before = page.text(".tools .count")
            page.click("#earlier")
            _until_other(page, before)
    lines = page.run("return document.querySelector('.log').textContent").splitlines()
    assert lines == [
        "log of launch",
        *(f"line {number}: step {number} loss {2 + 1 / (number + 1):.4f}" for number in range(6000)),
        "a new line at the end",
    ]
    page.run(
        "const choice = document.getElementById('rank'); choice.value = '3'; choice.dispatchEvent(new Event('change'))"
    )
    page.until(lambda: page.one("#earlier").is_enabled(), "the end of another log")
    assert "Rank 3 on node1" in page.text("#rank")


def test_earlier_lines_come_though_new_ones_are_being_read(visit: Visit, service: FakeServer) -> None:
    page = visit(f"{LIVE}?tab=log")
    page.sees("line 5999", ".log")
    before = page.text(".tools .count")
    service.state.reading.clear()
    page.until(lambda: service.state.held_back, "a look for new lines")
    page.click("#earlier")
    service.state.reading.set()
    _until_other(page, before)


def test_a_log_that_is_replaced_is_read_anew(visit: Visit, service: FakeServer) -> None:
    page = visit(f"{LIVE}?tab=log")
    page.sees("line 5999", ".log")
    service.state.log_text = "it begins again\n"
    page.sees("it begins again", ".log")
    page.sees_not("line 5999", ".log")


def test_the_configuration_is_filtered(visit: Visit) -> None:
    page = visit(f"{LIVE}?tab=config")
    page.sees("23 keys")
    page.press("/", "optimizer adam")
    page.sees("1 of 23 keys")
    assert page.text(".config").split("\n") == ["optimizer.name", "adamw"]


def test_samples_newest_first(visit: Visit) -> None:
    page = visit(f"{LIVE}?tab=samples")
    page.sees("the town begins with a mill")
    assert [head.text for head in page.all(".sample h3")] == ["Step 1,000", "Step 500"]
    newest = page.one(".sample")
    assert [name.text for name in newest.find_elements("css selector", "dt")] == ["prompt", "continuation"] * 2
    assert newest.find_elements("css selector", "dd")[2].text == "In the north"


@pytest.mark.parametrize(
    ("path", "action", "confirm", "number", "sent", "state"),
    [
        (LIVE, "cancel", "Cancel the job", 41, {"now": False}, "STOPPING"),
        (LIVE, "hold", "Hold", 41, {}, "STOPPING"),
        (HELD, "release", None, 46, {}, "QUEUED"),
        (FAILED, "retry", None, 44, {}, "QUEUED"),
        (WAITING, "hold", None, 45, {}, "HELD"),
    ],
)
def test_buttons(
    visit: Visit,
    service: FakeServer,
    path: str,
    action: str,
    confirm: str | None,
    number: int,
    sent: dict[str, object],
    state: str,
) -> None:
    page = visit(path)
    page.click(f"[data-action={action}]")
    if confirm:
        page.button(confirm, "dialog").click()
    page.sees(f"Job {number}:", "#messages")
    assert service.state.calls == [("POST", f"jobs/{number}/{action}", sent)]
    assert service.state.job(number)["state"] == state
    page.sees({"STOPPING": "Stopping", "QUEUED": "Queued", "HELD": "Held"}[state], ".title")


def test_stopping_at_once_and_priority_and_tags(visit: Visit, service: FakeServer) -> None:
    page = visit(LIVE)
    page.click("[data-action=priority]")
    field = page.one("dialog input[name=priority]")
    field.clear()
    field.send_keys("9\n")
    page.until(lambda: service.state.job(41)["priority"] == 9, "the priority")
    page.click("[data-action=tags]")
    tags = page.one("dialog input[name=tags]")
    assert tags.get_attribute("value") == "baseline paper"
    tags.clear()
    tags.send_keys("paper final\n")
    page.until(lambda: service.state.job(41)["tags"] == ["paper", "final"], "the tags")
    page.sees("final", ".title")
    page.click("[data-action=cancel]")
    page.sees("steps since the last checkpoint are lost", "dialog")
    page.click("dialog input[name=now]")
    page.button("Cancel the job", "dialog").click()
    page.until(lambda: service.state.calls[-1] == ("POST", "jobs/41/cancel", {"now": True}), "stopped at once")


def test_jobs_of_others_have_no_buttons(visit: Visit) -> None:
    page = visit(SPIKY, token="submit-token")
    page.sees("grace")
    assert page.text(".run-head .buttons") == "Compare"
    page = visit(LIVE, token="submit-token")
    page.sees("Priority", ".run-head .buttons")


def test_a_run_that_does_not_exist(visit: Visit) -> None:
    page = visit("/runs/0123456789ab")
    page.sees("no run 0123456789ab", "#messages")


@pytest.mark.parametrize("tab", ["curves", "config", "samples"])
def test_the_chosen_tab_is_in_sight_on_a_phone_without_room_for_all_tabs(visit: Visit, tab: str) -> None:
    page = visit("/queue")
    page.screen(chromium.PHONE)
    page = visit(f"{LIVE}?tab={tab}")
    edges = "const e = document.querySelector(arguments[0]).getBoundingClientRect(); return [e.left, e.right]"
    page.one(f"#tab-{tab}[aria-selected=true]")
    page.until(
        lambda: page.run(edges, f"#tab-{tab}")[0] >= 0 and page.run(edges, f"#tab-{tab}")[1] <= chromium.PHONE[0],
        "the whole tab",
    )
