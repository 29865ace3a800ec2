"""The project's commands in this process: what a user gets, without the seconds that a process takes to start.

    done = command("hvd-train", "optimizer.lr=hot", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")

Each begins as in a new process, and leaves this one as it was: signals, log, environment, random numbers, imports.
What needs a process of its own stays real: kills, full disks, what is imported when.
"""

import gc
import importlib
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import IO, Any
from unittest.mock import patch

import torch

Done = subprocess.CompletedProcess[str]
LOG = "hvd_transformer"
_MODULES = {"hvd-train": "train", "hvd-transformer": "main"}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_TORCH_SEED = 67280421310721  # torch's own, of a new process
_THREAD_SECONDS = 30.0
_LIBRARIES = tuple(path for path in sys.path if path)  # also what PYTHONPATH or a .pth file names


def command(
    program: str,
    *words: object,
    folder: str | Path | None = None,
    text: str = "",
    environment: Mapping[str, str] | None = None,
    hide: Sequence[str] = (),
    report: bool = False,
) -> Done:
    """Runs `hvd-train` or `hvd-transformer` with these words, in `folder`, `text` on its standard input.

    The packages to `hide` cannot be imported, as on a machine that lacks them. Without `report` hvd-train writes none.
    """
    given = [program, *map(str, words)]

    def run() -> None:
        sys.argv = list(given)
        importlib.import_module(f"hvd_transformer.cli.{_MODULES[program]}").main()

    with _without(hide), nullcontext() if report or program != "hvd-train" else _no_report():
        code, out, err, _ = captured(run, folder=folder, text=text, environment=environment)
    return subprocess.CompletedProcess(given, code, out, err)


def output(program: str, *words: object, code: int = 0) -> str:
    """Standard output of a command that ends with this exit code; with another one than 0, its one line of error."""
    done = command(program, *words)
    assert done.returncode == code, done.stdout + done.stderr
    if code == 0:
        return done.stdout
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def captured(
    action: Callable[[], Any],
    folder: str | Path | None = None,
    text: str = "",
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str, str, Any]:
    """The exit code that a process would have, what it would print, and what `action` returned."""
    result: Any = None
    threads = set(threading.enumerate())
    with _files() as (given, out, err), _as_in_a_new_process(folder, environment):
        given.write(text)
        given.seek(0)
        sys.stdin, sys.stdout, sys.stderr = given, out, err
        try:
            result, code = action(), 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=err)
        except Exception:
            traceback.print_exc(file=err)
            code = 1
        gc.collect()  # closes files, with which their locks end; idle threads of pools end, too
        for thread in set(threading.enumerate()) - threads:
            if not thread.daemon:  # which the interpreter waits for at its end
                thread.join(_THREAD_SECONDS)
        printed = []
        for stream in (out, err):
            stream.seek(0)
            printed.append(stream.read())
    return code, *printed, result


@contextmanager
def _files() -> Iterator[tuple[IO[str], IO[str], IO[str]]]:
    """Real files: faulthandler wants their numbers."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as given,
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as err,
    ):
        yield given, out, err


@contextmanager
def _as_in_a_new_process(folder: str | Path | None, environment: Mapping[str, str] | None) -> Iterator[None]:
    log = logging.getLogger(LOG)
    before = {
        "signals": [signal.getsignal(number) for number in _SIGNALS],
        "log": (list(log.handlers), log.level, log.propagate),
        "place": (Path.cwd(), dict(os.environ), list(sys.path), sys.argv, dict(sys.modules)),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "random": (random.getstate(), torch.get_rng_state()),
        "torch": (torch.get_default_dtype(), torch.get_num_threads()),
    }
    try:
        log.handlers, log.level, log.propagate = [], logging.NOTSET, True
        os.environ.update({"OMP_NUM_THREADS": "1", **(environment or {})})
        os.chdir(folder or Path.cwd())
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(_TORCH_SEED)
        with patch("os._exit", _Exit(os._exit, os.getpid())):
            yield
    finally:
        for handler in log.handlers:
            handler.close()
        log.handlers, log.level, log.propagate = before["log"]
        for number, handler in zip(_SIGNALS, before["signals"], strict=True):
            signal.signal(number, handler)
        cwd, variables, sys.path[:], sys.argv, modules = before["place"]
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(variables)
        _forget_plugins(modules)
        sys.stdin, sys.stdout, sys.stderr = before["streams"]
        state, torch_state = before["random"]
        random.setstate(state)
        torch.set_rng_state(torch_state)
        dtype, threads = before["torch"]
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)


class _Exit:
    """`os._exit` ends the command and not this process; a child's ends the child."""

    def __init__(self, real: Callable[[int], Any], pid: int) -> None:
        self._real, self._pid = real, pid

    def __call__(self, code: int) -> None:
        if os.getpid() != self._pid:
            self._real(code)
        raise SystemExit(code)


def _forget_plugins(modules: Mapping[str, Any]) -> None:
    """What was imported from where the user stood: the next one may have another file of that name."""
    installed = (sys.prefix, sys.base_prefix, str(Path(__file__).parent.parent), *_LIBRARIES)
    for name in sys.modules.keys() - modules.keys():
        file = getattr(sys.modules[name], "__file__", None)
        if file and not str(Path(file).resolve()).startswith(tuple(str(Path(path).resolve()) for path in installed)):
            del sys.modules[name]
    importlib.invalidate_caches()


@contextmanager
def _no_report() -> Iterator[None]:
    """Its charts take longer than most of these runs; `distributed/test_run_directory.py` has them."""
    name = "hvd_transformer.reporting.run_report"
    before, stub = sys.modules.get(name), ModuleType(name)
    stub.write_report = lambda run: run  # type: ignore[attr-defined]
    sys.modules[name] = stub
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


@contextmanager
def _without(packages: Sequence[str]) -> Iterator[None]:
    hidden = {
        name: module
        for name, module in sys.modules.items()
        if any(name == package or name.startswith(f"{package}.") for package in packages)
    }
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]  # None: an import of it fails
    try:
        yield
    finally:
        for package in packages:
            del sys.modules[package]
        sys.modules.update(hidden)
