"""The pages with the service itself: `serve --runs` over the run directory of a job at work."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import chromium
from browser.chromium import Browser
from browser.test_page_shape import MOST_BYTES
from hvd_transformer.folder_lock import FolderLock

_STEPS = 3000


def _line(step: int) -> str:
    loss = 80.0 if step == 1777 else 2 + 6 / (1 + step / 100)
    return (
        json.dumps({"step": step, "epoch": 1, "samples": 8 * step, "loss": loss, "lr": 1e-3, "grad_norm": 0.5}) + "\n"
    )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run directory, with a name that is HTML. It is locked as by training: the service follows runs at work."""
    folder = tmp_path / "runs" / "<b>first"
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text("task: language_model\nseed: 1\noptimizer:\n  lr: 0.001\n", encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(map(_line, range(1, _STEPS + 1))), encoding="utf-8")
    (folder / "logs" / "rank-000.log").write_text("the first line\n", encoding="utf-8")
    lock = FolderLock(folder / ".lock", "hvd-train")
    lock.take()
    yield folder
    lock.release()


@pytest.fixture
def link(run: Path, tmp_path: Path) -> Iterator[str]:
    """The link that `serve` prints."""
    command = [
        sys.executable,
        "-m",
        "hvd_transformer.cli.main",
        "serve",
        "--runs",
        str(run.parent),
        "--state",
        str(tmp_path / "state"),
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        try:
            yield next(line.split()[-1] for line in service.stdout if "#token=" in line)
        finally:
            service.terminate()


def test_a_run_in_the_table_and_on_its_page(window: Browser, link: str, run: Path) -> None:
    window.screen(chromium.DESK)
    window.complaints()
    window.driver.get(link)
    window.sees("<b>first", "tbody")
    window.sees("3,000", "tbody")
    assert "token" not in window.driver.current_url
    window.click("tbody a.name")
    window.one("figure[aria-label=Loss] canvas")
    loaded = window.run("return performance.getEntriesByType('resource').map(e => e.encodedBodySize)")
    assert sum(loaded) <= MOST_BYTES

    with (run / "metrics.jsonl").open("a", encoding="utf-8") as metrics:
        metrics.write(_line(_STEPS + 1).replace('"lr": 0.001', '"lr": 0.0077'))
    window.until(lambda: "0.0077" in window.text("figure[aria-label='Learning rate'] .values"), "the new point")

    window.click("#tab-log")
    window.sees("the first line", ".log")
    window.click("#tab-config")
    window.sees("optimizer.lr")
    assert window.complaints() == []
    window.driver.get("about:blank")


@pytest.mark.slow
def test_twenty_pages_are_live_at_once(window: Browser, link: str, run: Path) -> None:
    """More than the connections that a browser opens to one service."""
    window.screen(chromium.DESK)
    window.complaints()
    window.driver.get(link)
    window.sees("<b>first", "tbody")
    window.click("tbody a.name")
    page = window.driver.current_url
    for _ in range(19):
        window.driver.switch_to.new_window("window")  # a tab would hide the one before, which then asks for nothing
        window.driver.get(page)
        window.one("figure[aria-label=Loss] canvas")
    tabs = window.driver.window_handles
    assert len(tabs) == 20
    began = time.monotonic()
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as metrics:
        metrics.write(_line(_STEPS + 1).replace('"lr": 0.001', '"lr": 0.0077'))
    for tab in tabs:
        window.driver.switch_to.window(tab)
        window.until(lambda: "0.0077" in window.text("figure[aria-label='Learning rate'] .values"), "the new point")
    print(f"the point was on all 20 pages after {time.monotonic() - began:.2f} s")
    assert window.complaints() == []
    for tab in tabs[1:]:
        window.driver.switch_to.window(tab)
        window.driver.close()
    window.driver.switch_to.window(tabs[0])
    window.driver.get("about:blank")
