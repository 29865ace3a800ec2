"""Slurm: `sbatch` submits, `squeue` and `sacct` tell, `scancel` stops.

Source: the manual pages of these commands. `squeue` forgets a job a few minutes after its end (`MinJobAge`); `sacct` is
asked for those, if there is accounting.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence

from hvd_transformer.errors import UserError
from hvd_transformer.own_folder import user_name
from hvd_transformer.plugin import CODE
from hvd_transformer.service.engines.backend import Ended, EngineFault, OverLimit, Sighting, Submission
from hvd_transformer.service.engines.commands import CommandFailed, CommandMissing, Commands
from hvd_transformer.service.launching.launch_command import own_variables

_SQUEUE = "JobID:|,State:|,exit_code:|,Name:|,NodeList:|,Reason:|"
_SACCT = "JobIDRaw,State,ExitCode,JobName,NodeList,Reason"
_AT_ONCE = 1000  # job ids on one command line
_SINCE = "now-30days"  # for how long a service may be down, from a crash as it submits a job
_RUNS = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"}
_ENDED = {
    "BOOT_FAIL": Ended.LOST,
    "CANCELLED": Ended.CANCELLED,
    "COMPLETED": Ended.EXITED,
    "DEADLINE": Ended.CANCELLED,
    "FAILED": Ended.EXITED,
    "LAUNCH_FAILED": Ended.LOST,
    "NODE_FAIL": Ended.LOST,
    "OUT_OF_MEMORY": Ended.EXITED,
    "PREEMPTED": Ended.PREEMPTED,
    "RECONFIG_FAIL": Ended.LOST,
    "REVOKED": Ended.CANCELLED,
    "SPECIAL_EXIT": Ended.EXITED,
    "TIMEOUT": Ended.TIME_LIMIT,
}
# The controller does not answer: this passes, and no job is to blame.
_NO_ANSWER = re.compile(r"contact|timed out|temporar|try again|socket|communication", re.I)
# One message for all limits of accounts and QOS; a line before it may name the limit: QOSMaxSubmitJobPerUserLimit.
_OVER_LIMIT = "job submit limit"
_LIMIT = re.compile(r"^sbatch: error: (\w+)$", re.MULTILINE)


class Slurm:
    """The Slurm that this host's commands reach, as the user of this process."""

    title = "Slurm"

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        # An attempt without an id may be in Slurm: at first, and after a submission of which nobody knows how it ended.
        self._submission_lost = True

    def look(self, wanted: Mapping[str, str | None]) -> Mapping[str, Sighting]:
        """See `Backend`: one `squeue`, and a `sacct` if that does not know all jobs."""
        words = ("squeue", f"--user={user_name(os.geteuid())}", "--states=all", "--noheader", f"--Format={_SQUEUE}")
        seen = _sightings(self._commands.run(*words), wanted)
        forgotten = [external for name, external in wanted.items() if external is not None and name not in seen]
        for at in range(0, len(forgotten), _AT_ONCE):
            seen |= _sightings(self._accounting("--jobs", forgotten[at : at + _AT_ONCE]), wanted)
        unnumbered = [name for name, external in wanted.items() if external is None and name not in seen]
        if self._submission_lost:
            for at in range(0, len(unnumbered), _AT_ONCE):
                names = unnumbered[at : at + _AT_ONCE]
                seen |= _sightings(self._accounting("--name", names, f"--starttime={_SINCE}"), wanted)
            self._submission_lost = False
        return seen

    def gone(self, external: str) -> Sighting:
        """See `Backend`. It has ended, nobody knows how."""
        return Sighting(external, f"Slurm does not know job {external} any more", ended=Ended.EXITED)

    def submit(self, attempt: Submission) -> str:
        """See `Backend`. Without requeue: the service itself starts a job again, as a new attempt."""
        job = attempt.job
        words = ["sbatch", "--parsable", f"--job-name={attempt.name}", f"--comment={job.name}", "--no-requeue"]
        words += ["--output=" + str(attempt.files.out).replace("%", "%%")]  # %j would be the number of the job
        if attempt.seconds is not None:
            words += [f"--time={math.ceil((attempt.seconds + _save_seconds(attempt.file)) / 60)}"]
        environment = {**attempt.values, **own_variables(job, attempt.files), "PYTHONSAFEPATH": "1"}
        if attempt.code is not None:
            environment[CODE] = str(attempt.code)
        self._submission_lost = True
        try:
            printed = self._commands.run(*words, *job.sbatch, text=attempt.file, env=environment, cwd=job.folder)
        except CommandFailed as error:
            if _NO_ANSWER.search(str(error)):
                raise
            self._submission_lost = False
            raise _refusal(error) from None
        external = printed.strip().partition(";")[0]  # the name of the cluster may follow
        if not external.isdigit():
            raise EngineFault(f"sbatch: printed no job id but {printed[:100]!r}")
        self._submission_lost = False
        return external

    def stop(self, sightings: Sequence[Sighting], now: bool) -> None:
        """See `Backend`. The script passes the signal on to the launcher, which lets the ranks save."""
        save = [found.external for found in sightings if found.runs and not now]
        end = [found.external for found in sightings if now or not found.runs]
        for options, jobs in ((("--batch", "--signal=TERM"), save), ((), end)):
            for at in range(0, len(jobs), _AT_ONCE):
                self._commands.run("scancel", "--quiet", *options, *jobs[at : at + _AT_ONCE])

    def clean(self, claim: str) -> None:
        """See `Backend`. Values were in the environment of `sbatch`."""

    def _accounting(self, by: str, jobs: Sequence[str], *more: str) -> str:
        """Jobs that `squeue` has forgotten, from `sacct`; empty without it, or without accounting."""
        options = ("--allocations", "--noheader", "--parsable2", f"--format={_SACCT}")
        try:
            return self._commands.run("sacct", *options, *more, f"{by}={','.join(jobs)}")
        except CommandMissing:
            return ""
        except CommandFailed as error:
            if "accounting storage is disabled" in str(error):
                return ""
            raise


def _refusal(error: CommandFailed) -> UserError | OverLimit:
    """`OverLimit` for a limit on how many jobs there may be at once, and for one that Slurm does not name."""
    if _OVER_LIMIT not in str(error):
        return UserError(str(error))
    limit = found[1] if (found := _LIMIT.search(error.errors)) else None
    words = str(error) if limit is None else f"{error}: {limit}"
    return OverLimit(words) if limit is None or "Submit" in limit else UserError(words)


def _sightings(text: str, wanted: Mapping[str, str | None]) -> dict[str, Sighting]:
    rows = (line.strip().split("|", 5) for line in text.splitlines())
    return {row[3]: _sighting(*row) for row in rows if len(row) == 6 and row[3] in wanted}


def _sighting(number: str, state: str, code: str, name: str, nodes: str, reason: str) -> Sighting:
    state, title = state.partition(" ")[0], f"Slurm job {number}"  # "CANCELLED by 1000"
    if state in _RUNS:
        return Sighting(number, f"{title} on {nodes}", runs=True)
    if state not in _ENDED:  # PENDING, CONFIGURING, and what later versions may have
        return Sighting(number, f"{title}: {reason.rstrip('|') if state == 'PENDING' else state}")
    ended = _ENDED[state]
    if ended is not Ended.EXITED:
        return Sighting(number, f"{title}: {state}", ended=ended)
    if state == "COMPLETED":
        return Sighting(number, f"{title}: {state}", ended=ended, code=0)
    exit_code = _exit_code(code) or 1
    return Sighting(number, f"{title}: {state}, exit code {exit_code}", ended=ended, code=exit_code)


def _exit_code(text: str) -> int:
    """Shell exit code from sacct's CODE:SIGNAL or squeue's wait status."""
    code, _, number = text.partition(":")
    if not code.isdigit():
        return 0
    value, by_signal = (int(code), int(number)) if number.isdigit() else (int(code) >> 8, int(code) & 0x7F)
    return 128 + by_signal if by_signal else value


def _save_seconds(script: str) -> int:
    """How long before Slurm's time limit the script lets the ranks save: the job's own time limit ends then."""
    found = re.search(r"^#SBATCH --signal=B:USR1@(\d+)$", script, re.MULTILINE)
    return int(found[1]) if found else 0
