"""Runs a job to its end across restarts: after a rank, a host or the network fails, and when hosts come back.

Each start is a new horovodrun, which resumes from the newest complete checkpoint (Horovod's own elastic mode can
deadlock). Between two starts nothing of the job is left on any host.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from hvd_transformer.errors import STALLED, WRONG_INPUT, UserError
from hvd_transformer.folder_lock import ENDED_STARTS, START
from hvd_transformer.launch.agents import HostAgents, HostLost
from hvd_transformer.launch.attempt import AttemptResult, Stop, run_attempt
from hvd_transformer.launch.connection.connections import HostConnections
from hvd_transformer.launch.doctor.findings import Finding
from hvd_transformer.launch.horovodrun_command import PROXIES, Horovodrun
from hvd_transformer.launch.host_discovery import Examine, HostDiscovery, of_no_host
from hvd_transformer.launch.host_pool import HostPool
from hvd_transformer.launch.hostfile import Host
from hvd_transformer.launch.output.launch_output import LaunchOutput
from hvd_transformer.launch.restart_policy import Limits, RestartPolicy, Verdict
from hvd_transformer.launch.root_cause import in_words

_NAMES = 8  # of hosts, in a message
_RESUMING = "resuming"
_LOOK_SECONDS = 1.0  # between two looks at the hosts that a restart waits for
_FAILED_SECONDS = 5.0  # after a look that failed
_ENDED_STARTS = 100  # that ranks are told of: Linux takes no environment variable above 128 KiB


@dataclass(frozen=True)
class LaunchPlan:
    """What to run, and which failures to tolerate."""

    worker: Sequence[str]
    again: Sequence[str]  # the worker's command line at a restart
    values: Mapping[str, str]  # environment variables for the ranks only
    environment: Mapping[str, str]  # of horovodrun
    limits: Limits
    min_ranks: int
    job: str = ""  # a name that the job's other launchers have, too, if there are any


class Supervisor:
    """One job, from its first start to its end.

    The pool supplies the hosts of each start; `examine` says which of them cannot be used (None: nobody looks).
    `horovodrun` has everything else that the starts have in common.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        horovodrun: Horovodrun,
        pool: HostPool,
        connections: HostConnections,
        output: LaunchOutput,
        examine: Examine | None = None,
    ) -> None:
        self._plan, self._horovodrun, self._pool, self._output = plan, horovodrun, pool, output
        self._connections, self._examine = connections, examine or (lambda hosts: {})
        connections.withhold(plan.values.keys() - PROXIES)  # a ProxyCommand may need them
        self._examining = threading.Lock()  # no start begins while hosts are examined: agents answer no questions
        self._policy = RestartPolicy(plan.limits)
        self._stop: Stop | None = None
        self._asked, self._asking = 0, threading.Lock()  # to stop, as a count of signals, before `run`
        self._cause = ""  # of the last failure
        self._hosts: Sequence[Host] = ()  # of the last start
        self._refused: dict[str, str] = {}  # hosts that could not be used since then, and why
        self._lost: Sequence[str] = ()  # hosts by the last start
        self._last_step: int | None = None  # that a rank has told
        self._begun = False  # whether a rank has run
        self._job, self._starts = f"{plan.job}.{uuid4().hex}".lstrip("."), 0
        # Of which no rank can be left. What still has the lock of the run directory is of a recent one.
        self._ended_starts: deque[str] = deque(maxlen=_ENDED_STARTS)
        self._next = ""

    def run(self) -> int:
        """Return the exit code: 0, or that of the rank that failed first in the last start.

        Raises `UserError` if the job cannot be started.
        """
        with self._asking:
            stop = self._stop = Stop()
            if self._asked:
                stop.request(self._asked)
        try:
            code = 1
            hosts = self._first_hosts(stop)
            while hosts is not None and not stop.count:
                try:
                    ended = self._start(hosts, stop)
                except HostLost as error:
                    if not self._may_go_on_without(error):
                        return code
                except UserError as error:  # hosts that do not fit together, such as one that has just joined
                    if not self._begun:
                        raise
                    self._cause = str(error)
                    self._output.message(self._cause)
                    if not self._obey(self._policy.judge_lost_host()):
                        return code
                else:
                    code = ended.code
                    if not self._may_restart(ended, stop):
                        return code
                # Also before the first rank ran: a restart waits for as many hosts as the job may run with.
                again = self._begun or self._policy.restarts > 0
                hosts = self._wait_for_hosts(stop) if again else self._first_hosts(stop)
            return code
        finally:
            stop.restore()

    def ask_to_stop(self, now: bool) -> None:
        """Let the ranks save and exit, or with `now` kill them. From any thread.

        Unlike a second signal, asking again changes nothing: who asks may not know that somebody has.
        """
        signals = 2 if now else 1
        with self._asking:
            if self._stop is None:
                self._asked = max(self._asked, signals)
            else:
                self._stop.request(signals)

    def how(self) -> dict[str, Any]:
        """How the job ended, for exit.json."""
        stopped = None if self._stop is None else self._stop.by
        return {
            "cause": self._cause if stopped is None else "it was asked to stop",
            "stopped": stopped,
            "restarts": self._policy.restarts,
            "step": self._last_step,
            "hosts": [host.name for host in self._hosts],
            "refused": self._refused,
            "lost": list(self._lost),
        }

    def _first_hosts(self, stop: Stop) -> list[Host] | None:
        """The hosts of the first start, without those that cannot be used; None: asked to stop.

        Raises `UserError`, which names such a host, if the others have too few slots.
        """
        while not stop.count:
            hosts = self._pool.hosts()
            refused = self._look_at(hosts)
            if not refused:
                return hosts
            first = next(iter(refused.values()))
            self._set_aside(refused, otherwise=UserError(f"{first} (--no-preflight starts anyway)"))
        return None

    def _look_at(self, hosts: Sequence[Host]) -> Mapping[str, Finding]:
        """The hosts among these that cannot be used, and why.

        Raises `UserError` for a problem of this host if it runs no rank: excluding hosts does not help.
        """
        with self._examining:
            refused = self._examine(hosts)
        for finding in of_no_host(refused, hosts):
            raise UserError(str(finding))
        self._refused |= {host: f"{finding.message}; {finding.cure}" for host, finding in refused.items()}
        return refused

    def _start(self, hosts: list[Host], stop: Stop) -> AttemptResult:
        plan, policy = self._plan, self._policy
        self._refused, self._lost = {}, ()
        horovodrun, self._hosts = replace(self._horovodrun, hosts=hosts), hosts
        newcomers = HostDiscovery(
            self._pool, horovodrun, self._connections, self._examine, self._examining, self._set_aside
        )
        self._output.start(hosts, f"restart {policy.restarts} of {plan.limits.restarts}" if policy.restarts else "")

        def look(agents: HostAgents) -> bool:
            self._begun = self._begun or agents.have_begun
            self._output.look(agents)
            return newcomers.found is not None

        words = plan.again if self._begun else plan.worker
        self._starts += 1
        name = f"{self._job}.{self._starts}"
        values = {**plan.values, START: name, ENDED_STARTS: " ".join(self._ended_starts)}
        ended: AttemptResult | None = None
        try:
            ended = run_attempt(
                horovodrun,
                words,
                values,
                plan.environment,
                self._connections,
                stop,
                self._output.show,
                self._output.message,
                look,
            )
        finally:
            newcomers.close()
            self._output.end(failed=ended is not None and ended.code != 0 and not ended.stopped)
        self._begun = self._begun or ended.begun
        if not ended.lost:
            self._ended_starts.append(name)
        if ended.stopped and not ended.lost and not stop.count:
            self._tell_of_stop(ended, newcomers.found)
        return ended

    def _tell_of_stop(self, ended: AttemptResult, found: Sequence[Host] | None) -> None:
        """Say how ranks ended that were asked to, so that hosts join or leave."""
        how = "the ranks have saved"
        if not ended.saved:
            seconds = self._connections.limits.save
            how = f"the ranks did not save within {seconds:.0f} s (--save-timeout) and were killed"
        elif ended.first is not None and ended.code != 1:  # with which a rank exits that has saved
            how = f"{in_words(ended.first, {})} while the ranks saved"
        if found is not None:
            self._output.message(f"{how}; new hosts: {_names(found)}")
        elif how != "the ranks have saved":
            self._output.message(how)

    def _may_restart(self, ended: AttemptResult, stop: Stop) -> bool:
        """Report a failure; return, after a back-off, whether to start again."""
        self._last_step = max((beat["step"] for beat in ended.beats.values()), default=self._last_step)
        self._lost = [*ended.lost, *ended.leaving]
        if ended.code == 0 or stop.count:
            self._cause = ""
            return False
        if ended.stopped and not ended.lost:  # to add or leave hosts: a rank that was asked to stop exits with 1
            self._policy.note_stop(ended)
            self._set_aside(ended.leaving)
            self._cause = "; ".join(ended.leaving.values())
            self._next = _RESUMING
            return not ended.leaving or self._plan.limits.restarts > 0
        cause = in_words(ended.first, ended.lost)
        self._output.failed(ended, cause)
        line = self._last_line(ended)
        is_input = ended.first is not None and ended.first.code == WRONG_INPUT  # then the line says it all
        self._cause = line if line and is_input else ": ".join(filter(None, (cause, line)))
        verdict = self._policy.judge(ended, replaceable=self._replaceable)
        if not self._obey(verdict):
            return False
        self._set_aside(verdict.at_fault)
        self._sleep(verdict.back_off, stop)
        return True

    def _last_line(self, ended: AttemptResult) -> str:
        """Last line of the rank that failed first, or of horovodrun, for readers who do not see the output."""
        if ended.lost or (ended.first is not None and (ended.first.code == STALLED or ended.first.code > 128)):
            return ""
        if ended.first is not None:
            return self._output.last_line(ended.first.rank)
        return ended.said.rstrip().rpartition("\n")[2]

    def _may_go_on_without(self, error: HostLost) -> bool:
        """After a host was lost before its ranks ran. Raises the error if the job has never run and cannot now."""
        self._cause = str(error)
        if self._begun:
            self._lost = [error.host]
        else:
            self._refused |= {error.host: error.why}
        self._set_aside({error.host: error}, otherwise=None if self._begun else error)
        if not self._begun or self._next == _RESUMING:  # no rank has failed
            return True
        verdict = self._policy.judge_lost_host()
        if verdict.give_up == "":
            self._output.message("the job ends, as --restarts is 0")
        return self._obey(verdict)

    def _obey(self, verdict: Verdict) -> bool:
        """Say why the job is given up, or note that it starts again; returns whether it does."""
        if verdict.give_up:
            self._cause = f"{self._cause}; {verdict.give_up}" if self._cause else verdict.give_up
            self._output.message(verdict.give_up)
        self._next = f"restart {self._policy.restarts} of {self._plan.limits.restarts}"
        return verdict.give_up is None

    def _replaceable(self, host: str) -> bool:
        try:
            return self._enough(self._pool.hosts(without=host))
        except UserError:  # a discovery script may fail occasionally
            return False

    def _enough(self, hosts: Sequence[Host]) -> bool:
        return sum(host.slots for host in hosts) >= self._plan.min_ranks

    def _set_aside(self, hosts: Mapping[str, object], otherwise: UserError | None = None) -> None:
        """Exclude hosts for a while; the values say why. Raises `otherwise`, if given, where too few are left."""
        seconds = {host: self._pool.cool_down(host) for host in hosts}
        if otherwise is not None and not self._enough(self._pool.hosts()):
            raise otherwise
        for host, why in hosts.items():
            self._output.message(f"{why}; excluded for {seconds[host]:.0f} s")

    def _wait_for_hosts(self, stop: Stop) -> list[Host] | None:
        """Wait until usable hosts have enough slots for the next start; None: give up."""
        told = ""
        while not stop.count:
            try:
                hosts, why = self._pool.hosts(), ""
                refused = self._look_at(hosts) if self._enough(hosts) else None
            except UserError as error:  # a discovery script may fail occasionally, and so may this host's network
                hosts, why, refused = [], str(error), None
            ranks = sum(host.slots for host in hosts)
            if refused:
                self._set_aside(refused)
            elif refused is not None:
                self._output.message(f"{self._next}: {ranks} ranks on {_names(hosts)}")
                return hosts
            elif (line := why or f"waiting for hosts: {ranks} slots now, {self._plan.min_ranks} needed") != told:
                self._output.message(line)
                told = line
            if (late := self._policy.out_of_time()) is not None:
                self._cause = "; ".join(filter(None, (self._cause, why, late)))
                self._output.message(late)
                return None
            self._sleep(_FAILED_SECONDS if why else _LOOK_SECONDS, stop)
        return None

    def _sleep(self, seconds: float, stop: Stop) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not stop.count:
            time.sleep(0.05)


def _names(hosts: Sequence[Host]) -> str:
    names = [host.name for host in hosts]
    more = len(names) - _NAMES
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:_NAMES])} and {more} more"
