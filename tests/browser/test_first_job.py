"""What a new user does: start a service, submit a job, and see it end in a browser. Nothing here is a stand-in."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import BIN, rank_environment

from browser import chromium
from browser.chromium import Browser

pytestmark = pytest.mark.distributed

PROGRAM = BIN / "hvd-transformer"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folders = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    return {**rank_environment(), **folders, "HVD_TRANSFORMER_SERVER": "", "HVD_TRANSFORMER_TOKEN": ""}


@pytest.fixture
def address(tmp_path: Path, environment: dict[str, str]) -> Iterator[str]:
    """What `serve` prints: the pages, with a token."""
    log = tmp_path / "serve.log"
    with log.open("wb") as file:
        words = [PROGRAM, "serve", "-H", "localhost:2", "--port", "0"]
        process = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"open: +(\S+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield found[1]
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    assert process.returncode == 0, log.read_text()


def test_three_commands_to_the_first_finished_job(
    tmp_path: Path, environment: dict[str, str], address: str, window: Browser
) -> None:
    began = time.monotonic()
    words = ["submit", "-np", "2", "--name", "first", "--", "--preset", "tiny", "training.max_steps=30"]
    done = subprocess.run([PROGRAM, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    window.screen(chromium.DESK)
    window.complaints()
    window.driver.get(address)
    window.sees("first")
    assert "token=" not in window.driver.current_url
    window.until(lambda: "Succeeded" in window.text("tbody tr[data-index]"), "the end of the job")
    took = time.monotonic() - began
    window.click("tbody tr[data-index] a.name")
    window.sees("30")
    window.sees("Loss")
    window.until(lambda: window.all("figure canvas"), "a curve")
    assert window.complaints() == []
    assert (tmp_path / "runs" / "first-1" / "summary.json").exists()
    print(f"{took:.1f} s from submit to the end, seen in the browser")
    if path := os.environ.get("SCREENSHOT"):
        window.driver.save_screenshot(path)
