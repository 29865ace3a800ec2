"""The page that compares runs."""

import math
from urllib.parse import parse_qs, urlsplit

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


def test_a_link_with_a_run_that_is_gone_shows_the_others(visit: Visit) -> None:
    page = visit(f"/compare?runs={run_id(100)},{'0' * 12}")
    page.sees("sweep-8/", ".legend")
    page.sees("A run of this comparison no longer exists", "#messages")
    page.until(lambda: page.driver.current_url.endswith(f"?runs={run_id(100)}"), "the others in the address")


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


_COUNT_DRAWINGS = """
  window.drawings = 0;
  const clear = CanvasRenderingContext2D.prototype.clearRect;
  CanvasRenderingContext2D.prototype.clearRect = function (...place) {
    window.drawings += 1;
    clear.apply(this, place);
  };
"""
_IN_SIGHT = "[...document.querySelectorAll('figure.chart')].filter(e => e.getBoundingClientRect().top < innerHeight)"
_ARE_DRAWN = f"const charts = {_IN_SIGHT}; return charts.length > 0 && charts.every(e => e.querySelector('canvas'))"
_REQUESTS = """
  return performance.getEntriesByType('resource')
    .map(({ name, startTime, responseEnd }) => ({ name, startTime, responseEnd }));
"""


def test_what_twenty_runs_cost(visit: Visit) -> None:
    """One request per run, one drawing per chart, half as many pixels as there are, and the library beside the data."""
    page = visit("/no/such/page")
    hook = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _COUNT_DRAWINGS})
    try:
        visit("/compare?runs=" + ",".join(run_id(number) for number in range(100, 120)))
        page.until(lambda: page.run(_ARE_DRAWN), "the charts in sight")
    finally:
        page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", hook)
    drawings, canvases = page.run("return [window.drawings, document.querySelectorAll('figure canvas').length]")
    assert drawings == canvases

    requests = page.run(_REQUESTS)
    curves = [request for request in requests if request["name"].partition("?")[0].endswith("/metrics")]
    assert len(curves) == 20
    pixels = page.run("return document.querySelector('figure .plot').clientWidth")
    widths = {int(parse_qs(urlsplit(request["name"]).query)["width"][0]) for request in curves}
    assert len(widths) == 1 and pixels / 4 < max(widths) <= pixels / 2
    assert sum("/compare?" in request["name"] for request in requests) == 1
    library = next(request for request in requests if request["name"].endswith("/uPlot.iife.min.js"))
    assert library["startTime"] < min(request["responseEnd"] for request in curves)


def test_the_modules_of_a_page_do_not_wait_for_the_login(visit: Visit) -> None:
    page = visit("/compare", token="")
    page.sees("Log in")
    page.until(
        lambda: any(request["name"].endswith("/compare_page.js") for request in page.run(_REQUESTS)), "its module"
    )


def test_nothing_chosen_says_what_to_do(visit: Visit) -> None:
    page = visit("/compare")
    page.sees("Choose runs to compare")
