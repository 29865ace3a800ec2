"""How long users wait for the queue itself: `python -m benchmarks.service_queue`.

submit    one job after the other, checked by the real checker and written to the real database
HTTP      the same as a command asks for it, through the socket of a real `serve` whose queue grows meanwhile
start     from the end of a job to the start of the launcher that gets its slot, with a queue that never is empty

Launchers are stand-ins that end by themselves; everything else is real.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from hvd_transformer.service.actions import Actions
from hvd_transformer.service.jobs import Host
from hvd_transformer.service.launching.attempts import Launchers
from hvd_transformer.service.manager import Manager
from hvd_transformer.service.remote.address import SOCKET, Address
from hvd_transformer.service.remote.client import Client
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.submitting.checker import Checker
from hvd_transformer.service.submitting.request import Request

SLOTS = 10
LAUNCHER = """#!/bin/sh
date "+start %s.%N" >>LOG
printf ! >"/proc/self/fd/$HVD_TRANSFORMER_BEGUN"
sleep 0.$((RANDOM_ % 9 + 1))
printf '{"code": 0, "cause": "", "step": 1, "refused": {}, "lost": []}' >"$HVD_TRANSFORMER_EXIT_FILE.new"
mv "$HVD_TRANSFORMER_EXIT_FILE.new" "$HVD_TRANSFORMER_EXIT_FILE"
date "+end %s.%N" >>LOG
""".replace("RANDOM_", "$$")


def p95(values: list[float]) -> float:
    """The 95th percentile."""
    return statistics.quantiles(values, n=20)[-1]


def http_seconds(folder: Path, jobs: int) -> list[float]:
    """The time of each request. Jobs are held, so nothing starts."""
    state = folder / "state"
    words = ("serve", "-H", "localhost:1", "--port", "0", "--state", str(state), "--runs", str(folder / "served"))
    program = Path(sys.executable).with_name("hvd-transformer")
    request = {
        "words": ["--preset", "tiny", "training.device=cpu"],
        "folder": str(folder),
        "num_ranks": 1,
        "hold": True,
    }
    with subprocess.Popen([program, *words], stdout=subprocess.DEVNULL) as serving:
        try:
            while not (state / SOCKET).exists():
                time.sleep(0.1)
                assert serving.poll() is None
            with closing(Client(Address(state))) as client:
                client.submit(request)  # starts the checking process
                seconds = []
                for _ in range(jobs):
                    began = time.perf_counter()
                    client.submit(request)
                    seconds.append(time.perf_counter() - began)
        finally:
            serving.terminate()
    return seconds


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    jobs = parser.parse_args().jobs
    with TemporaryDirectory() as name:
        folder = Path(name)
        log, launcher = folder / "log", folder / "launcher"
        launcher.write_text(LAUNCHER.replace("LOG", str(log)))
        launcher.chmod(0o755)
        with closing(Store(folder / "service.db")) as store, closing(Checker(folder / "code")) as checker:
            store.put_hosts([Host("h1", SLOTS)])
            launchers = Launchers(folder, [str(launcher)])
            manager = Manager(store, launchers, lambda run: None)
            actions = Actions(store, checker, folder / "runs", manager.wake, manager.kill)
            request = Request(words=["--preset", "tiny", "training.device=cpu"], folder=name, num_ranks=1)
            actions.submit(request, "ann", None)  # starts the checking process
            seconds = []
            for _ in range(jobs):
                began = time.perf_counter()
                actions.submit(request, "ann", None)
                seconds.append(time.perf_counter() - began)
            manager.start()
            while not log.exists() or log.read_text(encoding="ascii").count("end ") <= jobs:
                time.sleep(0.2)
            manager.close()
            launchers.close()
        requests = http_seconds(folder, jobs)
        times: dict[str, list[float]] = {"start": [], "end": []}
        for line in log.read_text(encoding="ascii").splitlines():
            what, _, moment = line.partition(" ")
            times[what].append(float(moment))
    ends, starts = sorted(times["end"]), sorted(times["start"])[SLOTS:]
    waits = [start - end for end, start in zip(ends, starts, strict=False)]
    print(f"{os.cpu_count()} cores, {jobs} jobs, {SLOTS} slots; milliseconds, median and 95th percentile")
    for what, values in (("submit", seconds), ("HTTP", requests), ("slot free to launcher started", waits)):
        print(f"{what}: {1000 * statistics.median(values):.1f}, {1000 * p95(values):.1f}")


if __name__ == "__main__":
    main()
