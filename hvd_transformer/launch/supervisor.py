"""Runs a job to its end across restarts: after a rank, a host or the network fails, and when hosts come back.

Each start is a new horovodrun, which resumes from the newest complete checkpoint (Horovod's own elastic mode can
deadlock). Between two starts nothing of the job is left on any host.
"""

import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from hvd_transformer.errors import STALLED, WRONG_INPUT, UserError
from hvd_transformer.launch.agents import HostAgents, HostLost
from hvd_transformer.launch.attempt import AttemptResult, Stop, run_attempt
from hvd_transformer.launch.connections import HostConnections
from hvd_transformer.launch.horovodrun_command import Horovodrun
from hvd_transformer.launch.host_connection import NoConnection
from hvd_transformer.launch.host_pool import HostPool
from hvd_transformer.launch.hostfile import Host
from hvd_transformer.launch.launch_screen import Screen

_SAME_STEP = 3  # failures at the same step, after which the job is given up
_BACK_OFF_SECONDS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)  # by consecutive failures without a new step
_WAIT_SECONDS = 600.0  # for enough hosts
_LOOK_SECONDS = 5.0  # between two searches for new hosts
_CONNECT_SECONDS = 30.0  # to a new host
_NAMES = 8  # of hosts, in a message


@dataclass(frozen=True)
class LaunchPlan:
    """What to run, and which failures to tolerate."""

    worker: Sequence[str]
    again: Sequence[str]  # the worker's command line at a restart
    values: Mapping[str, str]  # environment variables for the ranks only
    environment: Mapping[str, str]  # of horovodrun
    restarts: int
    min_ranks: int


class Supervisor:
    """One job, from its first start to its end.

    `horovodrun` holds the hosts of the first start; the pool supplies those of later starts.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        horovodrun: Horovodrun,
        pool: HostPool,
        connections: HostConnections,
        screen: Screen,
    ) -> None:
        self._plan, self._horovodrun, self._pool, self._screen = plan, horovodrun, pool, screen
        self._connections = connections
        self._restarts = 0
        self._failed_steps: list[int | None] = []  # of the latest failures, all at the same step
        self._last_step = -1
        self._fruitless = 0  # consecutive failures without a new step
        self._next = ""

    def run(self) -> int:
        """Return the exit code: 0, or that of the rank that failed first in the last start.

        Raises `UserError` if the job cannot be started.
        """
        stop = Stop()
        try:
            code, words, again = 1, self._plan.worker, False
            while True:
                try:
                    ended = self._start(words, stop)
                except HostLost as error:
                    if not again:
                        raise
                    self._cool_down(error.host, str(error))
                else:
                    code = ended.code
                    if not self._may_restart(ended, stop):
                        return code
                hosts = self._wait_for_hosts(stop)
                if hosts is None:
                    return code
                self._horovodrun = replace(self._horovodrun, hosts=hosts)
                words, again = self._plan.again, True
        finally:
            stop.restore()

    def _start(self, words: Sequence[str], stop: Stop) -> AttemptResult:
        plan, horovodrun = self._plan, self._horovodrun
        newcomers = HostDiscovery(self._pool, horovodrun, self._connections)
        self._screen.start(horovodrun.hosts, self._restarts)

        def look(agents: HostAgents) -> bool:
            self._screen.look(agents)
            return newcomers.found is not None

        ended: AttemptResult | None = None
        try:
            ended = run_attempt(
                horovodrun, words, plan.values, plan.environment, self._connections, stop, self._screen.show, look
            )
        finally:
            newcomers.close()
            self._screen.end(failed=ended is not None and ended.code != 0 and not ended.stopped)
        if newcomers.found is not None and ended.stopped and not stop.count:
            self._screen.message(f"the ranks have saved; new hosts: {_names(newcomers.found)}")
        return ended

    def _may_restart(self, ended: AttemptResult, stop: Stop) -> bool:
        """Report a failure; return, after a back-off, whether to start again."""
        if ended.code == 0 or stop.count:
            return False
        if ended.stopped and not ended.lost:  # to add hosts: a rank that was asked to stop exits with 1
            self._next = "resuming"
            return True
        self._screen.failed(ended, _cause(ended))
        if ended.code == WRONG_INPUT or not self._plan.restarts:
            return False
        if self._restarts == self._plan.restarts:
            self._screen.message(f"giving up after {self._restarts} restarts")
            return False
        step = max((beat["step"] for beat in ended.beats.values()), default=None)
        if not ended.lost:
            self._failed_steps = [*(old for old in self._failed_steps if old == step), step]
        if len(self._failed_steps) == _SAME_STEP:
            where = "before the first step" if step is None else f"after step {step}"
            self._screen.message(f"giving up: failed {_SAME_STEP} times {where}")
            return False
        for host in ended.lost:
            self._cool_down(host, f"host {host} is lost")
        self._restarts += 1
        self._next = f"restart {self._restarts} of {self._plan.restarts}"
        self._fruitless = 0 if step is not None and step > self._last_step else self._fruitless + 1
        self._last_step = max(self._last_step, -1 if step is None else step)
        self._sleep(_BACK_OFF_SECONDS[min(self._fruitless, len(_BACK_OFF_SECONDS) - 1)], stop)
        return True

    def _cool_down(self, host: str, why: str) -> None:
        self._screen.message(f"{why}; excluded for {self._pool.cool_down(host):.0f} s")

    def _wait_for_hosts(self, stop: Stop) -> list[Host] | None:
        """Wait until the hosts have enough slots for the next start; None: give up."""
        deadline, told = time.monotonic() + _WAIT_SECONDS, False
        while not stop.count:
            try:
                hosts, why = self._pool.hosts(), ""
            except UserError as error:  # a discovery script may fail occasionally
                hosts, why = [], str(error)
            ranks = sum(host.slots for host in hosts)
            if ranks >= self._plan.min_ranks:
                self._screen.message(f"{self._next}: {ranks} ranks on {_names(hosts)}")
                return hosts
            if time.monotonic() > deadline:
                self._screen.message(f"giving up: no hosts for {self._plan.min_ranks} ranks in {_WAIT_SECONDS:.0f} s")
                return None
            if not told:
                self._screen.message(why or f"waiting for hosts: {ranks} slots now, {self._plan.min_ranks} needed")
                told = True
            self._sleep(1.0, stop)
        return None

    def _sleep(self, seconds: float, stop: Stop) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not stop.count:
            time.sleep(0.05)


class HostDiscovery:
    """Searches, while a job runs, for new hosts that would give it more ranks, and connects to them."""

    def __init__(self, pool: HostPool, now: Horovodrun, connections: HostConnections) -> None:
        self.found: list[Host] | None = None
        self._pool, self._now, self._connections = pool, now, connections
        self._closed = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def close(self) -> None:
        """End the search."""
        self._closed.set()

    def _look(self) -> None:
        while self.found is None and not self._closed.wait(_LOOK_SECONDS):
            with suppress(UserError):  # no answer from the script or a host: try again later
                hosts = self._pool.hosts()
                known = {host.name for host in self._now.hosts}
                new = [host for host in hosts if host.name not in known]
                if new and sum(host.slots for host in hosts) > self._now.num_ranks:
                    opened = self._connections.run(
                        self._connections.open([host.name for host in new], _CONNECT_SECONDS)
                    )
                    if not any(isinstance(connection, NoConnection) for connection in opened.values()):
                        self.found = new


def _cause(ended: AttemptResult) -> str:
    """The root cause, in words."""
    if ended.lost:
        return "; ".join(f"host {host} is lost" + f": {why}" * bool(why) for host, why in ended.lost.items())
    if ended.first is None:
        return "horovodrun failed"
    code, how = ended.first.code, f"with exit code {ended.first.code}"
    if code == STALLED:
        how = "because no step ended within the limit (exit code 75)"
    elif code > 128:
        with suppress(ValueError):
            how += f" ({signal.Signals(code - 128).name})"
    return f"rank {ended.first.rank} on host {ended.first.host} failed first, {how}"


def _names(hosts: Sequence[Host]) -> str:
    names = [host.name for host in hosts]
    more = len(names) - _NAMES
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:_NAMES])} and {more} more"
