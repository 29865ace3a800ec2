"""Every reason for which a test may be skipped in CI, and on which machines.

Where CI=true any other skip fails the session: a package that is missing there must not hide the tests that need it.
"""

import os
import sys
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch


class Skip(NamedTuple):
    reason: str  # a pattern, as in shells
    machine: str  # where it may be given
    here: bool  # whether this machine is one


_CAP_SYS_ADMIN = 21


def _may_mount() -> bool:
    """Root may not in most containers."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> _CAP_SYS_ADMIN & 1)


_ROOT = os.geteuid() == 0
_GPU = torch.cuda.is_available()
_SHARED = (Path(__file__).parent.parent.parent / "shared" / "data").is_dir()
_GIT = (Path(__file__).parent.parent / ".git").exists()
_MANY = os.environ.get("MANY_RANKS") == "1"
_CONTAINER = _ROOT and not _may_mount()

ALLOWED = [
    Skip("needs a GPU", "without a GPU", not _GPU),
    Skip("needs two GPUs", "with fewer", torch.cuda.device_count() < 2),
    Skip("needs Horovod with NCCL", "with GPUs that Horovod cannot send from", _GPU),
    Skip("this machine has the GPUs", "with two GPUs", _GPU),
    Skip("needs root*", "of another user than root", not _ROOT),
    Skip("root may write everywhere", "of root", _ROOT),
    Skip("cannot make hosts of network namespaces: *", "a container without CAP_SYS_ADMIN", _CONTAINER),
    Skip("cannot mount a file system here: *", "a container without CAP_SYS_ADMIN", _CONTAINER),
    Skip("needs /dev/fuse", "a container without this device", not Path("/dev/fuse").exists()),
    Skip("needs the right to mount", "a container without CAP_SYS_ADMIN", _CONTAINER),
    Skip("needs the data sets in */shared/data", "without ../shared/data beside the checkout", not _SHARED),
    Skip("no WikiText-2 at *", "without ../shared/data beside the checkout", not _SHARED),
    Skip("could not import 'trackio': *", "without Trackio, which is not in dev", not find_spec("trackio")),
    Skip("could not import 'llama_cpp': *", "without llama.cpp, which pip compiles", not find_spec("llama_cpp")),
    Skip("needs MANY_RANKS=1 *", "without MANY_RANKS=1, as 64 ranks take much memory", not _MANY),
    Skip("not a git checkout", "without git's folder", not _GIT),
    Skip("mpirun and bare horovodrun need a path without spaces", "with a space in its path", " " in sys.prefix),
]


class UnexpectedSkips:
    """A pytest plugin: the session fails, at its end, where a test was skipped for another reason."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look(report)

    def _look(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail") or not isinstance(report.longrepr, tuple):
            return
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not any(skip.here and fnmatchcase(reason, skip.reason) for skip in ALLOWED):
            self._found.append(f"{report.nodeid}: {reason}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._found and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._found:
            terminalreporter.section("skips that tests/allowed_skips.py does not allow on this machine", red=True)
            for line in self._found:
                terminalreporter.line(line)
