"""The table of runs and jobs: filters, order, columns, windowed rows, actions on many."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from browser.chromium import Browser
from browser.conftest import Visit
from browser.fake_run import run_id
from browser.fake_service import FakeServer


def _names(page: Browser) -> list[str]:
    return list(
        page.run("return [...document.querySelectorAll('tbody tr[data-index] a.name')].map(link => link.title)")
    )


def _filter(page: Browser, line: str) -> None:
    page.one("#filter").clear()
    page.one("#filter").send_keys(line)


def _total(page: Browser) -> str:
    return page.text(".tools .count")


def test_rows_show_what_runs_are_and_do(visit: Visit, service: FakeServer) -> None:
    page = visit("/?text=warmup")
    page.sees("gpt-small/warmup-2k")
    row = page.text("tbody tr[data-index]")
    for part in ("baseline", "Running", "/ 2,000", "ada", "k", "in "):
        assert part in row
    page.driver.get(service.url)
    page.until(lambda: _total(page) == f"{len(service.state.runs)} runs", "the number of runs")
    for state in ("Queued", "Held", "Starting", "Stopping", "Failed", "Cancelled", "Finished", "Succeeded"):
        page.driver.get(f"{service.url}/?state={state.upper()}")
        page.sees(state, "tbody")


def test_only_rows_in_sight_are_drawn_and_all_can_be_reached(visit: Visit, service: FakeServer) -> None:
    page = visit()
    page.sees("gpt-small/warmup-2k")
    # Only past rows that have been read, and until the rows at the new place are drawn.
    scroll = """
      const seen = [...document.querySelectorAll('tbody a.name')].map(link => link.title);
      if (!document.querySelector('tbody tr.wait')) document.querySelector('.scroller').scrollTop += 500;
      return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(seen))));
    """
    seen: set[str] = set()
    wanted = {run.name for run in service.state.runs}

    def scroll_on() -> bool:
        seen.update(page.run(scroll))
        assert len(page.all("tbody tr[data-index]")) < 60
        return seen == wanted

    page.until(scroll_on, "every run while scrolling")


def test_filters_are_combined_and_kept_in_the_address(visit: Visit, service: FakeServer) -> None:
    page = visit()
    page.sees("gpt-small/warmup-2k")

    def expect(count: int) -> None:
        page.until(lambda: _total(page) == f"{count} {'run' if count == 1 else 'runs'}", f"{count} runs")

    runs = service.state.runs
    page.press("/", "user:grace")
    expect(sum(run.owner == "grace" for run in runs))
    page.press(" optimizer.lr:0.0003")
    expect(sum(run.owner == "grace" and run.config["optimizer.lr"] == 3e-4 for run in runs))
    page.press(" tag:sweep-9")
    wanted = [
        run for run in runs if run.owner == "grace" and run.config["optimizer.lr"] == 3e-4 and "sweep-9" in run.tags
    ]
    expect(len(wanted))
    assert "where=optimizer.lr:0.0003" in page.driver.current_url
    page.driver.refresh()
    expect(len(wanted))
    assert page.one("#filter").get_attribute("value") == "user:grace tag:sweep-9 optimizer.lr:0.0003"
    _filter(page, "warmup")
    expect(1)
    _filter(page, "no such thing")
    page.sees("No run matches this filter.")
    page.button("Clear the filter").click()
    expect(len(runs))
    page.click("#mine")
    expect(sum(run.owner == "ada" for run in runs))


def test_sorting_by_a_metric_both_ways(visit: Visit, service: FakeServer) -> None:
    page = visit("/?state=SUCCEEDED")
    page.sees("sweep-")
    ended = [run for run in service.state.runs if run.state == "SUCCEEDED"]
    by_loss = [run.name for run in sorted(ended, key=lambda run: run.value("loss", run.step or 0) or 0.0)]
    page.button("Loss", "thead").click()
    page.until(lambda: _names(page)[:10] == by_loss[:10], "the smallest loss first")
    assert page.one("th[aria-sort=ascending]").text.startswith("↑")
    page.button("↑", "thead").click()
    page.until(lambda: _names(page)[:10] == by_loss[::-1][:10], "the largest loss first")
    assert "sort=loss&order=desc" in page.driver.current_url
    page.button("↓", "thead").click()
    page.until(lambda: "sort=" not in page.driver.current_url, "the first order")


def test_sorting_by_job_and_by_the_estimated_end(visit: Visit, service: FakeServer) -> None:
    page = visit("/?state=RUNNING")
    page.sees("gpt-small/warmup-2k")
    page.click("#columns")
    page.click("input[value=job]")
    page.button("Show", "dialog").click()
    page.button("Job", "thead").click()
    jobs = [run for run in service.state.runs if run.state == "RUNNING" and run.job]
    by_job = [run.name for run in sorted(jobs, key=lambda run: run.job["id"] if run.job else 0, reverse=True)]
    page.until(lambda: _names(page)[: len(by_job)] == by_job, "the newest job first")
    page.button("Ends", "thead").click()
    page.until(lambda: "sort=estimated_end&order=asc" in page.driver.current_url, "the order in the address")
    page.one("th[aria-sort=ascending]")


def test_columns_can_be_metrics_and_settings_and_are_kept(visit: Visit, service: FakeServer) -> None:
    page = visit()
    page.sees("gpt-small/warmup-2k")
    page.click("#columns")
    page.click("input[value='metric:grad_norm']")
    page.click("input[value=user]")
    page.one("dialog input[name=keys]").send_keys("optimizer.lr")
    page.button("Show", "dialog").click()
    page.sees("Gradient norm", "thead")
    page.sees("lr", "thead")
    page.sees_not("User", "thead")
    page.until(lambda: "0.0003" in page.text("tbody"), "the learning rates")
    page.driver.refresh()
    page.sees("Gradient norm", "thead")
    page.click("#columns")
    page.button("First choice", "dialog").click()
    page.sees("User", "thead")


def test_many_jobs_are_cancelled_after_a_question(visit: Visit, service: FakeServer) -> None:
    page = visit("/?text=translation/de")
    page.sees("translation/de-en")
    page.click("thead input")
    page.sees("2 selected")
    page.button("Cancel", ".selected").click()
    page.sees("Cancel 2 jobs?", "dialog")
    page.button("Back", "dialog").click()
    assert service.state.calls == []
    page.button("Cancel", ".selected").click()
    page.button("Cancel the job", "dialog").click()
    page.sees("2 jobs cancelled.", "#messages")
    [(_, path, body)] = service.state.calls
    assert (path, sorted(body.pop("ids")), body) == ("jobs/bulk", [45, 46], {"action": "cancel", "now": False})
    page.until(lambda: page.text("tbody").count("Cancelled") == 2, "two cancelled jobs")


@pytest.mark.parametrize(
    ("filter_", "action", "text", "after"),
    [
        ("state=QUEUED", "Hold", "3 jobs held.", "Held"),
        ("state=HELD", "Release", "1 job released.", ""),
        ("state=CANCELLED&text=typo", "Retry", "1 job queued again.", ""),
    ],
)
def test_bulk_actions(visit: Visit, filter_: str, action: str, text: str, after: str) -> None:
    page = visit(f"/?{filter_}")
    page.one("tbody tr[data-index]")
    page.click("thead input")
    page.sees("selected")
    page.button(action, ".selected").click()
    page.sees(text, "#messages")
    page.until(lambda: not page.all("tbody tr[data-index]"), "the jobs have left this state")


def test_tags_of_many_keep_those_that_differ(visit: Visit, service: FakeServer) -> None:
    page = visit("/?text=gpt-medium")
    page.sees("gpt-medium/elastic")
    page.click("thead input")
    page.button("Tags", ".selected").click()
    page.one("dialog input[name=tags]").send_keys("july paper")
    page.button("Set tags", "dialog").click()
    page.sees("Tags of 2 runs changed.", "#messages")
    assert service.state.job(49)["tags"] == ["elastic", "july", "paper"]
    assert service.state.job(50)["tags"] == ["july", "paper"]


def test_tags_with_spaces_commas_and_quotes_stay_whole(visit: Visit, service: FakeServer) -> None:
    kept = ["two words", "a,b", 'say "hi"', "plain", '"', "no\u00a0break"]
    job = service.state.job(49)
    service.state.run(job["run"]).tags = job["tags"] = list(kept)
    page = visit("/?text=gpt-medium/elastic")
    page.sees("gpt-medium/elastic")
    page.click("thead input")
    page.button("Tags", ".selected").click()
    page.one("dialog input[name=tags]").send_keys(' new, "three new words" ,')
    page.button("Set tags", "dialog").click()
    page.sees("Tags of 1 run changed.", "#messages")
    [(_, _, body)] = service.state.calls
    assert (body["add"], body["remove"]) == (["new", "three new words"], [])
    assert job["tags"] == [*kept, "new", "three new words"]


def test_which_runs_may_be_missing_is_shown(visit: Visit, service: FakeServer) -> None:
    service.state.notes = ["/runs has more than 10,000 folders that are no runs: new runs may be missing here"]
    page = visit()
    page.sees(service.state.notes[0], "#notes")
    service.state.notes = []
    service.state.set_state(service.state.job(47), "RUNNING")
    page.sees_not("10,000 folders", "main")


def test_a_waiting_job_that_is_cancelled_may_come_back_to_its_place(visit: Visit) -> None:
    page = visit("/?text=gpt-medium/elastic")
    page.sees("gpt-medium/elastic")
    page.click("thead input")
    page.button("Cancel", ".selected").click()
    page.sees("It leaves the queue; Retry puts it back into its old place.", "dialog")


def test_runs_without_jobs_are_tagged(
    visit: Visit, another_service: Callable[..., AbstractContextManager[FakeServer]]
) -> None:
    with another_service(3, queue_on=False) as server:
        for run in server.state.runs:
            run.job = None
        first = server.state.runs[0]
        page = visit(server=server, token="submit-token")
        page.sees(first.name)
        page.run("document.querySelectorAll('tbody input').forEach((box) => box.click())")
        assert page.text(".selected").split()[2:] == ["Compare", "Tags", "Clear"]
        page.button("Tags", ".selected").click()
        page.one("dialog input[name=tags]").send_keys("july")
        page.button("Set tags", "dialog").click()
        page.sees(f"Tags of {len(server.state.runs)} runs changed.", "#messages")
        page.until(lambda: all("july" in run.tags for run in server.state.runs), "the tags")
        page.driver.get(f"{server.url}/runs/{first.id}")
        page.sees("july", ".title")
        page.click("[data-action=tags]")
        page.one("dialog input[name=tags]").clear()
        page.button("Set tags", "dialog").click()
        page.until(lambda: not first.tags, "the tags of one run")
        page.driver.get("about:blank")


def test_what_fails_is_said_until_it_is_closed(visit: Visit, service: FakeServer) -> None:
    page = visit("/?text=translation/de")
    page.sees("translation/de-en")
    service.state.set_state(service.state.job(46), "SUCCEEDED")
    page.sees("Succeeded", "tbody")
    page.click("thead input")
    service.state.refuse = (429, "too many requests: try again in 3 s")
    page.button("Cancel", ".selected").click()
    page.button("Cancel the job", "dialog").click()
    page.sees("too many requests: try again in 3 s", "#messages")
    service.state.refuse = None
    page.click("#messages .error button")
    page.sees_not("too many requests", "body")


def test_selected_runs_are_compared(visit: Visit) -> None:
    page = visit("/?state=RUNNING")
    page.sees("gpt-large/spike")
    page.click("thead input")
    page.button("Compare", ".selected").click()
    page.until(
        lambda: f"/compare?runs={run_id(1)},{run_id(2)}" in page.driver.current_url, "the page of the comparison"
    )


def test_changes_arrive_by_themselves(visit: Visit, service: FakeServer) -> None:
    page = visit("/?text=classifier/imdb")
    page.sees("Starting", "tbody")
    page.sees("Live", "#connection")
    service.state.set_state(service.state.job(47), "RUNNING")
    page.sees("Running", "tbody")


def test_who_may_only_look_has_no_buttons(visit: Visit) -> None:
    page = visit("/?state=QUEUED", token="view-token")
    page.sees("translation/de-en")
    page.click("thead input")
    assert page.button("Compare", ".selected")
    assert page.text(".selected").split() == ["3", "selected", "Compare", "Clear"]
    assert not page.all("#submit")


def test_nothing_yet_says_what_to_do(
    visit: Visit, another_service: Callable[..., AbstractContextManager[FakeServer]]
) -> None:
    for queue_on, command in ((True, "hvd-transformer submit -np 2"), (False, "hvd-transformer launch -np 2")):
        with another_service(0, queue_on) as server:
            server.state.runs.clear()
            page = visit(server=server)
            page.sees(command)
            assert ("Submit" in page.text(".tools")) is queue_on
            page.driver.get("about:blank")


def test_submit_shows_commands_to_copy(visit: Visit) -> None:
    page = visit()
    page.click("#submit")
    page.sees("hvd-transformer submit -np 2 --array optimizer.lr=1e-3,3e-4", "dialog")
    page.button("Close", "dialog").click()
    page.until(lambda: not page.all("dialog"), "no dialog")
