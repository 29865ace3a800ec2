"""The launchers of the jobs: starts them, watches them and stops them. They outlive the service.

Each is an ordinary `hvd-transformer launch` in a session of its own. What must be known of it after a restart of the
service is in the job's spool folder (`attempt_files.py`). At any moment the service may be killed:

before the lock is taken        nothing was started
before the launcher is started  the lock is free and has no process: nothing was started
later                           the launcher goes on, holds the lock and wrote its process there before its program ran
"""

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hvd_transformer.errors import WRONG_INPUT, UserError
from hvd_transformer.launch.launch_record import launcher_of
from hvd_transformer.launch.output.launch_client import LaunchClient
from hvd_transformer.plugin import CODE
from hvd_transformer.service.jobs import Allocation, Attempt, Job
from hvd_transformer.service.launching.attempt_files import AttemptFiles, write_hosts
from hvd_transformer.service.launching.launch_command import launch_environment, launch_words, secret_values
from hvd_transformer.service.launching.orphans import Orphans
from hvd_transformer.service.outcome import Exit, not_started
from hvd_transformer.service.submitting.code_snapshot import install
from hvd_transformer.service.submitting.not_now import NotNow, SlowFolders, check_folder, check_run_folder, error_of

LAUNCHER = (sys.executable, "-m", "hvd_transformer.cli.main")
# The shell becomes the launcher, so the process is written down before there is anything that could be lost; with a
# full disk there is no launcher.
_WITH_PID = ("/bin/sh", "-c", 'echo $$ >"$0" && exec "$@"')
_KILLED = "its launcher was killed"
_LOOK_SECONDS = 0.2  # between two looks at what wakes nobody: files, and locks of processes that cannot be watched
_ORPHANS_SECONDS = 1.0  # likewise for ranks that a launcher may have left
_OBEY_SECONDS = 30.0  # for a launcher that was asked to kill its ranks


@dataclass(frozen=True)
class Change:
    """News of an attempt. `exit`: how it ended, and none of its ranks is left; None: its ranks run."""

    job: int
    attempt: int
    exit: Exit | None = None


@dataclass
class _Launcher:
    """A launcher from its start or adoption until its end has been told."""

    job: Job
    attempt: Attempt
    files: AttemptFiles
    process: subprocess.Popen[bytes] | None = None  # of a child
    pid: int | None = None
    pidfd: int | None = None
    begun: bool = False  # and told
    asked_to_kill: float | None = None
    orphans: Orphans | None = None  # once it was killed

    def change(self, exit: Exit | None = None) -> Change:
        return Change(self.job.id, self.attempt.number, exit)


@dataclass
class _Watches:
    """What wakes up `wait`: the ends of processes, and `wake`."""

    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    pipe: tuple[int, int] = field(default_factory=lambda: os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))

    def __post_init__(self) -> None:
        self.selector.register(self.pipe[0], selectors.EVENT_READ)


class Launchers:
    """All attempts that may be running. `state`: the service's state folder; `command`: what `launch` follows.

    `wake` may be called from any thread, the rest from one at a time.
    """

    def __init__(self, state: Path, command: Sequence[str] = LAUNCHER) -> None:
        self._state, self._command = state, tuple(command)
        self._launchers: dict[int, _Launcher] = {}  # by job
        self._watches, self._folders = _Watches(), SlowFolders()

    def spool(self, job: int) -> Path:
        """The spool folder of a job."""
        return self._state / "jobs" / str(job)

    def pids(self) -> frozenset[int]:
        """The processes of the launchers."""
        return frozenset(found.pid for found in list(self._launchers.values()) if found.pid is not None)

    def start(self, job: Job, attempt: Attempt, environment: Mapping[str, str]) -> Exit | None:
        """Start the launcher of an attempt that the database has as STARTING.

        `environment` is for variables that this process does not have. Returns None, or why nothing was started: for
        wrong input, or because that is not possible now, as with a full disk, or a folder that is not mounted. Raises
        `FileExistsError` if the attempt was started before.
        """
        files = AttemptFiles(self.spool(job.id), attempt.number)
        try:
            self._check_folders(job)
            files.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_hosts(files.folder, attempt.allocation)
            if job.code:
                code = install(self._state / "code" / job.code, Path(job.output_dir))
                environment = {**environment, CODE: str(code)}
            process = self._spawn(job, files, environment)
        except UserError as error:
            return _refusal(error)
        except OSError as error:
            if isinstance(error, FileExistsError) and error.filename == str(files.lock):
                raise
            return _refusal(error_of(error, f"{error.filename or files.folder}: {error.strerror or error}"))
        self._watch(_Launcher(job, attempt, files, process, process.pid))
        return None

    def why_not_now(self, job: Job) -> str | None:
        """Why `start` would not start the job now, in the words of its answer, as far as that can be told before.

        None: it would, or would tell what is wrong with the job.
        """
        try:
            self._check_folders(job)
        except NotNow as error:
            return _refusal(error).cause
        except UserError:
            pass
        return None

    def adopt(self, job: Job, attempt: Attempt) -> Exit | None:
        """Take over an attempt that was started before this service.

        Returns its end. None: its launcher lives, or was killed and its ranks may be alive; `poll` tells what becomes
        of it.
        """
        found = _Launcher(job, attempt, AttemptFiles(self.spool(job.id), attempt.number))
        if found.files.is_held():
            with suppress(OSError):  # the earlier service may have ended just before it told the hosts of a growth
                write_hosts(found.files.folder, attempt.allocation)
            self._watch(found)
        elif (exit := self._end(found)) is not None:
            return exit
        else:
            self._launchers[job.id] = found
        return None

    def poll(self) -> Iterator[Change]:
        """What has happened since the last call.

        A change counts as told when the next one is asked for: one that could not be settled, as with a full disk, is
        told again.
        """
        ended = {id(key.data) for key, _ in self._watches.selector.select(0) if key.data is not None}
        with suppress(BlockingIOError):
            os.read(self._watches.pipe[0], 1 << 12)
        for found in list(self._launchers.values()):
            if not found.begun and found.files.has_begun():
                yield found.change()
                found.begun = True
            if found.orphans is not None:
                exit = None if self._may_live(found, found.orphans) else Exit(None, _KILLED)
            elif id(found) in ended or (found.pidfd is None and not self._watch_again(found)):
                exit = self._end(found)
            else:
                continue
            if exit is not None:
                yield found.change(exit)
                del self._launchers[found.job.id]

    def stop(self, job: Job, attempt: Attempt, now: bool) -> None:
        """Ask the launcher to let the ranks save and end, or with `now` to kill them; `poll` tells the end.

        One that does not answer gets a signal. One that was asked to kill its ranks a while ago is killed.
        """
        found = self._launchers.get(job.id)
        if found is None or found.attempt.number != attempt.number or found.orphans is not None:
            return
        if now and found.asked_to_kill is None:
            found.asked_to_kill = time.monotonic()
        elif now and time.monotonic() - (found.asked_to_kill or 0.0) > _OBEY_SECONDS:
            self._signal(found, signal.SIGKILL)
            return
        run = Path(job.output_dir)
        try:
            told = self._folders.ask(run, lambda: _ask(run, found.pid, "kill" if now else "stop"))
        except NotNow:  # the folder does not answer
            told = False
        if not told:
            self._signal(found, signal.SIGKILL if now else signal.SIGTERM)

    def write_hosts(self, job: Job, allocation: Allocation) -> None:
        """Let an elastic job grow: its launcher finds the new hosts by itself. Raises `OSError`."""
        write_hosts(self.spool(job.id), allocation)

    def wait(self, timeout: float) -> None:
        """Wait until `poll` may have something to tell, or `wake` was called."""
        for found in list(self._launchers.values()):
            if found.orphans is not None:
                timeout = min(timeout, _ORPHANS_SECONDS)
            elif not found.begun or found.pidfd is None:
                timeout = min(timeout, _LOOK_SECONDS)
        self._watches.selector.select(timeout)

    def wake(self) -> None:
        """End a `wait`, or the next one."""
        with suppress(BlockingIOError):
            os.write(self._watches.pipe[1], b"!")

    def close(self) -> None:
        """Watch no more. The launchers go on."""
        for found in self._launchers.values():
            self._unwatch(found)
        self._launchers.clear()
        self._watches.selector.close()
        for end in self._watches.pipe:
            os.close(end)

    def _check_folders(self, job: Job) -> None:
        """Raise `NotNow` or `UserError` for what the launcher could not use: it would end with wrong input.

        A folder may never answer; the other jobs do not wait for it.
        """
        run = Path(job.output_dir)
        self._folders.ask(Path(job.folder), lambda: check_folder(job.folder))
        self._folders.ask(run.parent, lambda: check_run_folder(run))
        if job.env_names:
            self._folders.ask(Path(job.env_file or "").parent, lambda: secret_values(job))

    def _spawn(self, job: Job, files: AttemptFiles, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        descriptors = [files.take_lock()]
        try:
            for path in (files.begun, files.out):
                descriptors.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
            lock, begun, out = descriptors
            its_environment = launch_environment(job, environment, begun, files)
            return subprocess.Popen(
                [*_WITH_PID, str(files.lock), *self._command, *launch_words(job, files)],
                cwd=job.folder,
                env=its_environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=[begun, lock],
                start_new_session=True,
            )
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _watch(self, found: _Launcher) -> None:
        self._launchers[found.job.id] = found
        self._watch_again(found)

    def _watch_again(self, found: _Launcher) -> bool:
        """Watch the launcher's process if that is possible by now; returns whether it lives."""
        if found.process is not None and found.process.poll() is not None:
            return False
        if found.pid is None:
            found.pid = found.files.pid()
        if found.pid is not None:
            with suppress(OSError):  # it has ended, or the kernel is older than 5.3
                found.pidfd = os.pidfd_open(found.pid)
        if not found.files.is_held():
            self._unwatch(found)
            return False
        if found.pidfd is not None:  # of the launcher: its number was not free to be used again
            self._watches.selector.register(found.pidfd, selectors.EVENT_READ, found)
        return True

    def _unwatch(self, found: _Launcher) -> None:
        if found.pidfd is not None:
            with suppress(KeyError):
                self._watches.selector.unregister(found.pidfd)
            os.close(found.pidfd)
            found.pidfd = None

    def _end(self, found: _Launcher) -> Exit | None:
        """How a launcher that has ended did so; None if it was killed: its ranks may be alive."""
        self._unwatch(found)
        code = None if found.process is None else found.process.wait()
        if (exit := found.files.read_exit()) is not None:
            return exit
        ran = found.files.pid() is not None
        if code is not None and code >= 0:  # it could not tell
            line = found.files.last_line()
            return Exit(code, line) if ran else not_started(line or f"exit code {code}")
        if code == -signal.SIGTERM:  # while it has ranks, it takes the signal itself
            return Exit(None, _KILLED, stopped="SIGTERM")
        if not ran:
            return not_started("the service ended" if code is None else _KILLED)
        self._lose(found)
        return None

    def _may_live(self, found: _Launcher, orphans: Orphans) -> bool:
        try:
            return self._folders.ask(Path(found.job.output_dir), orphans.may_live)
        except NotNow:  # the folder does not answer
            return True

    def _lose(self, found: _Launcher) -> None:
        hosts = len(found.attempt.allocation)
        found.orphans = Orphans(Path(found.job.output_dir), hosts, found.job.launch)

    def _signal(self, found: _Launcher, number: signal.Signals) -> None:
        with suppress(OSError):  # it has ended
            if found.pidfd is not None:
                signal.pidfd_send_signal(found.pidfd, number)
            elif found.pid is not None and found.files.is_held():
                os.kill(found.pid, number)


def _refusal(error: UserError) -> Exit:
    return not_started(str(error)) if isinstance(error, NotNow) else Exit(WRONG_INPUT, str(error))


def _ask(run: Path, pid: int | None, what: str) -> bool:
    """Ask the launcher of a run directory to "stop" or "kill" its ranks; returns whether it is `pid` and was told."""
    try:
        if pid is None or launcher_of(run).more["pid"] != pid:
            return False
        with closing(LaunchClient(run)) as client:
            client.ask(what)
    except (UserError, OSError, KeyError):
        return False
    return True
