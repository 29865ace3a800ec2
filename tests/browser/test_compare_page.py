"""The page that compares runs."""

import math

from browser.conftest import Visit
from browser.fake_run import run_id
from browser.fake_service import FakeServer

RUNS = [100, 103, 104, 106]
ADDRESS = "/compare?runs=" + ",".join(map(run_id, RUNS))


def test_only_settings_that_differ_and_the_best_final_metrics(visit: Visit, service: FakeServer) -> None:
    page = visit(ADDRESS)
    page.sees("optimizer.lr", "table[aria-label='Settings that differ']")
    chosen = [service.state.run(run_id(number)) for number in RUNS]
    keys = {key for run in chosen for key in run.config}
    wanted = sorted(key for key in keys if len({str(run.config.get(key)) for run in chosen}) > 1)
    rows = page.all("table[aria-label='Settings that differ'] tbody th")
    assert [row.text for row in rows] == wanted
    losses = [run.value("loss", run.step or 0) or math.inf for run in chosen]
    cells = page.all("table[aria-label='Final metrics'] th[title=loss] ~ td")
    assert [cell.get_attribute("class").split()[-1] == "winner" for cell in cells] == [
        loss == min(losses) for loss in losses
    ]


def test_curves_of_all_runs_share_a_cursor_with_their_values(visit: Visit) -> None:
    from selenium.webdriver import ActionChains

    page = visit(ADDRESS)
    plot = page.one("figure[aria-label=Loss] .u-over")
    ActionChains(page.driver).move_to_element(plot).perform()
    page.until(lambda: len(page.all("figure[aria-label=Loss] .readout div")) == 4, "a value of each run")
    page.until(
        lambda: "step " in page.text("figure[aria-label='Learning rate'] .values"), "the same step on another chart"
    )


def test_runs_are_added_hidden_and_removed_and_the_link_has_it_all(visit: Visit, service: FakeServer) -> None:
    page = visit(f"/compare?runs={run_id(100)}")
    page.sees("sweep-8/", ".legend")
    page.one("#add-run").send_keys("warmup")
    page.sees("gpt-small/warmup-2k", "#found")
    page.one("#add-run").send_keys("\n")
    page.sees("gpt-small/warmup-2k", ".legend")
    assert f"runs={run_id(100)},{run_id(1)}" in page.driver.current_url
    page.run("document.querySelector('.segments input[value=samples]').click()")
    page.until(lambda: "x=samples" in page.driver.current_url, "the axis in the address")
    page.driver.refresh()
    page.until(lambda: len(page.all(".legend li")) == 2, "two runs")
    assert page.run("return document.querySelector('.segments input[value=samples]').checked")
    page.click(".legend li:first-child input")
    page.click(".legend li:first-child button")
    page.until(lambda: f"runs={run_id(1)}&" in page.driver.current_url, "one run")


def test_twenty_runs_at_most_all_told_apart(visit: Visit, service: FakeServer) -> None:
    page = visit("/compare?runs=" + ",".join(run_id(number) for number in range(100, 125)))
    page.until(lambda: len(page.all(".legend li")) == 20, "twenty runs")
    looks = page.run("return [...document.querySelectorAll('.legend .swatch')].map(swatch => swatch.style.borderTop)")
    assert len(set(looks)) == 20
    assert not page.one("body").find_elements("css selector", ".picker:not([hidden])")


def test_nothing_chosen_says_what_to_do(visit: Visit) -> None:
    page = visit("/compare")
    page.sees("Choose runs to compare")
