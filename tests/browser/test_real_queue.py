"""The pages of the queue and of the hosts with the service itself; launchers and checks of hosts are stand-ins."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from browser import chromium
from browser.chromium import Browser
from hvd_transformer.service import service as module
from hvd_transformer.service.jobs import Host, Needs, State
from hvd_transformer.service.launching.attempts import Launchers
from hvd_transformer.service.launching.host_checks import HostState
from hvd_transformer.service.service import Options, TrainingService
from hvd_transformer.service.storage.store import NewJob, Store
from hvd_transformer.service.web.listening import Listening

HOST = "stand-in-host"
# In place of hvd-transformer: its ranks run until it is told to end.
_LAUNCHER = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.write(int(os.environ["HVD_TRANSFORMER_BEGUN"]), b"!")
signal.sigwait({signal.SIGTERM})
exit_file = os.environ["HVD_TRANSFORMER_EXIT_FILE"]
with open(exit_file + ".new", "w") as file:
    file.write('{"code": 143, "cause": "SIGTERM", "step": 7, "refused": {}, "lost": []}')
os.rename(file.name, exit_file)
"""


class _HostChecks:
    """Every host is well."""

    def __init__(self, *others: Any) -> None: ...

    def start(self) -> None: ...

    def close(self) -> None: ...

    def suspect(self, hosts: Any) -> None: ...

    def states(self) -> dict[str, HostState]:
        return {HOST: HostState()}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """What the service has stored: a host of two slots, and three jobs that need both."""
    folder = tmp_path / "state"
    folder.mkdir()
    runs = tmp_path / "runs"
    with closing(Store(folder / "service.db")) as made:
        made.put_hosts([Host(HOST, 2)])
        names = ("first", "second", "third")
        made.add_jobs(
            [NewJob(name, "ann", time.time(), Needs(2, 2), str(runs / name), str(tmp_path), ()) for name in names]
        )
    with closing(Store(folder / "service.db", read_only=True)) as reader:
        yield reader


@pytest.fixture
def link(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of the pages, with a token."""
    launcher = tmp_path / "launcher.py"
    launcher.write_text(_LAUNCHER)
    made = []

    def launchers(state: Path) -> Launchers:
        made.append(Launchers(state, (sys.executable, "-S", "-E", str(launcher))))
        return made[0]

    monkeypatch.setattr(module, "Launchers", launchers)
    monkeypatch.setattr(module, "HostChecks", _HostChecks)
    listening = Listening(tmp_path / "state" / "service.sock")
    with closing(TrainingService(Options(tmp_path / "state", tmp_path / "runs", listening))) as service:
        thread = threading.Thread(target=service.run, name="service")
        thread.start()
        try:
            yield service.link()
        finally:
            service.stop()
            thread.join(20)
            for pid in made[0].pids():
                os.kill(pid, signal.SIGKILL)
            assert not thread.is_alive()


@pytest.fixture
def page(window: Browser, link: str) -> Iterator[Browser]:
    """The page of the queue."""
    window.screen(chromium.DESK)
    window.complaints()
    window.driver.get(link)
    window.one("#filter")  # the login is done
    window.click("nav a[href='/queue']")
    yield window
    complaints = window.complaints()
    window.driver.get("about:blank")
    assert complaints == []


def _rows(page: Browser, table: str) -> list[str]:
    """The names of the jobs in a table, in order."""
    script = "return [...document.querySelectorAll(arguments[0])].map((link) => link.innerText)"
    return list(page.run(script, f"table[aria-label='{table} jobs'] tbody a"))


def _waits(page: Browser, *names: str) -> None:
    page.until(lambda: _rows(page, "Waiting") == list(names), f"{names} in this order")


def _runs(page: Browser, *names: str) -> None:
    page.until(lambda: _rows(page, "Running") == list(names), f"{names} run")


def _is(store: Store, number: int, state: State) -> bool:
    job = store.job(number)
    return job is not None and job.state is state


def test_jobs_are_held_released_moved_and_cancelled(page: Browser, store: Store) -> None:
    _runs(page, "first")
    page.sees("Running", "table[aria-label='Running jobs']")
    _waits(page, "second", "third")
    page.sees("needs 2 slots", "table[aria-label='Waiting jobs']")

    page.click("[data-action=hold-2]")
    page.one("[data-action=release-2]")
    assert _is(store, 2, State.HELD)
    page.click("[data-action=release-2]")
    page.one("[data-action=hold-2]")
    assert _is(store, 2, State.QUEUED)

    page.click("[data-action=priority-3]")
    field = page.one("dialog input[name=priority]")
    field.clear()
    field.send_keys("7")
    page.button("Set", "dialog").click()
    page.sees("Job 3: changed.", "#messages")
    page.until(lambda: "7" in page.text("table[aria-label='Waiting jobs']"), "the new priority")

    page.click("[data-action=cancel-1]")
    page.sees("The ranks save a checkpoint and end", "dialog")
    page.button("Cancel the job", "dialog").click()
    _runs(page, "third")  # before the second, by its priority
    assert _is(store, 1, State.CANCELLED)

    page.click("[data-action=cancel-2]")
    page.button("Cancel the job", "dialog").click()
    page.sees("No job waits")
    assert _is(store, 2, State.CANCELLED)


def test_a_drained_host_takes_no_job_until_it_is_resumed(page: Browser, store: Store) -> None:
    _runs(page, "first")
    page.click("nav a[href='/hosts']")
    page.sees("1 host, 2 of 2 slots used")
    page.sees("first", f"[data-host={HOST}]")
    page.click(f"[data-action=drain-{HOST}]")
    page.sees("Its jobs go on to their end", "dialog")
    page.button("Drain", "dialog").click()
    page.sees("Drained", f"[data-host={HOST}]")

    page.click("nav a[href='/queue']")
    page.click("[data-action=cancel-1]")
    page.button("Cancel the job", "dialog").click()
    page.sees("No job runs.")
    assert _is(store, 1, State.CANCELLED) and _is(store, 2, State.QUEUED)

    page.click("nav a[href='/hosts']")
    page.sees("1 host, 0 of 2 slots used")
    page.click(f"[data-action=resume-{HOST}]")
    page.sees("second", f"[data-host={HOST}]")
    page.sees("Up", f"[data-host={HOST}]")
    assert _is(store, 2, State.RUNNING) or _is(store, 2, State.STARTING)
