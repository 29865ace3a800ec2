"""How long a browser takes to draw the page that compares runs: Chromium without a screen, on the service itself."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

CHROMIUM, CHROMEDRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,800")
_TIMES = 5
_WAIT_SECONDS = 300.0
# Every drawing of a chart begins with this call.
_NOTE_DRAWINGS = """
  const clear = CanvasRenderingContext2D.prototype.clearRect;
  CanvasRenderingContext2D.prototype.clearRect = function (...place) {
    window.drawn = performance.now();
    clear.apply(this, place);
  };
"""
_IS_DRAWN = """
  const inSight = [...document.querySelectorAll('figure.chart')]
    .filter((chart) => chart.getBoundingClientRect().top < innerHeight);
  return inSight.length > 0 && inSight.every((chart) => chart.querySelector('canvas'));
"""
_RUNS = "return (await (await fetch('/api/v1/runs?limit=500')).json()).items.map(({ id }) => id)"
_ARE_READ = """
  const read = async (id) => (await (await fetch(`/api/v1/runs/${id}/metrics?keys=loss`)).json()).complete;
  return (await Promise.all(arguments[0].map(read))).every(Boolean);
"""


def compare_page(runs: Path) -> dict[str, float]:
    """Compare all runs of a folder, at most 20: milliseconds from the address to the last chart in sight, and CPU time.

    The service has read the files before. Empty without Chromium and selenium.
    """
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        return {}
    if not (CHROMIUM.exists() and CHROMEDRIVER.exists()):
        return {}
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for option in _OPTIONS:
        options.add_argument(option)
    with _serving(runs) as (process, link):
        driver = webdriver.Chrome(options=options, service=Service(str(CHROMEDRIVER)))
        try:
            driver.get(link)
            _until(lambda: driver.execute_script("return document.querySelectorAll('tbody a.name').length > 0"))
            ids = driver.execute_script(_RUNS)
            _until(lambda: driver.execute_script(_ARE_READ, ids), pause=1.0)  # each look takes time from the reading
            driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _NOTE_DRAWINGS})
            driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
            address = f"{link.partition('/#')[0]}/compare?runs={','.join(ids)}"
            return _median([_draw(driver, address, process) for _ in range(_TIMES)])
        finally:
            driver.quit()


def _draw(driver: Any, address: str, service: int) -> dict[str, float]:
    driver.get("about:blank")
    before = _cpu_milliseconds(service)
    driver.get(address)
    _until(lambda: driver.execute_script(_IS_DRAWN))
    metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    task = next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")
    return {
        "20 runs compared, drawn in a browser, ms": driver.execute_script("return window.drawn"),
        "CPU time of the page's thread for it, ms": 1000 * task,
        "CPU time of the service for it, ms": _cpu_milliseconds(service) - before,
    }


@contextmanager
def _serving(runs: Path) -> Iterator[tuple[int, str]]:
    """The process number of a service, and the link that it prints."""
    with tempfile.TemporaryDirectory(prefix="service-") as state:
        words = [sys.executable, "-m", "hvd_transformer.cli.main", "serve", "--port", "0", "--state", state]
        with subprocess.Popen([*words, "--runs", runs], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield process.pid, next(line.split()[-1] for line in process.stdout if "#token=" in line)
            finally:
                process.terminate()


def _until(look: Callable[[], Any], pause: float = 0.05) -> None:
    end = time.monotonic() + _WAIT_SECONDS
    while not look():
        if time.monotonic() > end:
            raise TimeoutError(f"the page was not ready within {_WAIT_SECONDS:.0f} s")
        time.sleep(pause)


def _cpu_milliseconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _median(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(row[name] for row in rows) for name in rows[0]}
