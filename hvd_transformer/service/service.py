"""All parts of a service put together: the queue over its hosts, the runs that it shows, and the web server."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

from hvd_transformer.errors import UserError
from hvd_transformer.own_folder import make_own_folder, user_name
from hvd_transformer.service.actions import Actions
from hvd_transformer.service.engines.backend import Backend
from hvd_transformer.service.engines.commands import Commands
from hvd_transformer.service.engines.external_jobs import ExternalJobs
from hvd_transformer.service.engines.kubernetes import Kubernetes
from hvd_transformer.service.engines.slurm import Slurm
from hvd_transformer.service.housekeeping import Housekeeping
from hvd_transformer.service.jobs import WAITING, Engine, Host
from hvd_transformer.service.launching.attempts import Launchers
from hvd_transformer.service.launching.host_checks import HostChecks
from hvd_transformer.service.launching.plain_launches import PlainLaunches
from hvd_transformer.service.manager import Manager
from hvd_transformer.service.remote.address import DATABASE
from hvd_transformer.service.runs.index import RunIndex
from hvd_transformer.service.runs.launcher_beats import LauncherBeats
from hvd_transformer.service.runs.metrics.curves import Curves
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.storage.tokens import Role, Tokens
from hvd_transformer.service.submitting.checker import Checker
from hvd_transformer.service.web import parts
from hvd_transformer.service.web.app import create_app
from hvd_transformer.service.web.listening import Listening
from hvd_transformer.service.web.server import WebServer
from hvd_transformer.service.webhook import Webhook, check_address

_LINK, _LINK_SECONDS = "link of serve", 86_400.0  # the token in the address that `serve` prints


@dataclass(frozen=True)
class Options:
    """The options of `serve`. `hosts`: to add; a service that never had a host only shows runs.

    `engines`: to accept jobs for, also without hosts. `limits`: those of every user that are to change, by the names of
    `Limits`; None: no limit. `retention_days`: infinite to keep ended jobs for ever, None to change nothing.
    """

    state: Path
    runs: Path
    listening: Listening
    hosts: Sequence[Host] = ()
    webhook: str | None = None
    retention_days: float | None = None
    limits: Mapping[str, int | None] = field(default_factory=dict)
    engines: Sequence[Engine] = ()


class TrainingService:
    """From construction to `close`; `run` serves until the process is told to end. Jobs go on without it.

    Raises `UserError` if another service has the state folder, or for what cannot be used.
    """

    def __init__(self, options: Options) -> None:
        options.listening.check()  # before anything is made or remembered
        if options.webhook is not None:
            check_address(options.webhook)
        with ExitStack() as stack:
            _make_folder("--state", options.state, mode=0o700)
            _make_folder("--runs", options.runs)
            self._store = store = Store(options.state / DATABASE)
            stack.callback(store.close)
            store.put_hosts(options.hosts)
            if options.retention_days is not None:
                store.set_retention_days(None if math.isinf(options.retention_days) else options.retention_days)
            if options.limits:
                store.set_limits(replace(store.all_limits()[None], **options.limits))
            self._tokens, runs, beats = Tokens(store.database), RunIndex(options.runs), LauncherBeats()
            stack.callback(beats.close)
            curves = Curves()
            housekeeping = Housekeeping(store, runs, curves, options.state)
            self._problem: Callable[[], str | None] = lambda: None
            has_queue = bool(
                store.hosts() or options.engines or store.external_attempts() or store.jobs(WAITING, limit=1)
            )
            queue = self._queue(options, runs, housekeeping, stack) if has_queue else None
            service = parts.Service(
                version("hvd-transformer"), store, self._tokens, runs, curves, beats, queue, lambda: self._problem()
            )
            listening = options.listening
            self._server = WebServer(create_app(service, listening.names, listening.behind_proxy), listening)
            housekeeping.start()
            stack.callback(housekeeping.close)
            self.has_queue = queue is not None
            self._parts = stack.pop_all()

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`."""
        self._server.run()

    def stop(self) -> None:
        """Make `run` return. From any thread."""
        self._server.stop()

    def close(self) -> None:
        """End all threads."""
        self._parts.close()

    def link(self) -> str:
        """The address of the pages with a token, which makes its user an admin for a day.

        Earlier addresses end; browsers that have logged in with one stay logged in for the rest of its day.
        """
        secret = self._tokens.renew(_LINK, user_name(os.geteuid()), Role.ADMIN, time.time() + _LINK_SECONDS)
        return f"{self._server.url}/#token={secret}"

    def _queue(self, options: Options, runs: RunIndex, housekeeping: Housekeeping, stack: ExitStack) -> parts.Queue:
        """The queue, with its threads running."""
        store, launchers, checker = self._store, Launchers(options.state), Checker(options.state / "code")
        stack.callback(checker.close)
        stack.callback(launchers.close)
        if options.webhook is not None:
            webhook = Webhook(options.webhook, store)
            webhook.start()
            stack.callback(webhook.close)
        commands = Commands()
        backends: dict[Engine, Backend] = {
            Engine.SLURM: Slurm(commands),
            Engine.KUBERNETES: Kubernetes(commands, store.service_id()),
        }
        external = ExternalJobs(
            store,
            backends,
            checker.job_file,
            options.state,
            commands,
            lambda: manager.wake(),
            lambda job: manager.refused(job),
        )
        checks = HostChecks(store.hosts, options.runs.resolve(), lambda: _busy(store), lambda: manager.wake())
        launches = PlainLaunches(launchers.pids, lambda: [host.name for host in store.hosts()], lambda: manager.wake())
        manager = Manager(
            store,
            launchers,
            runs.progress,
            launches.taken,
            checks.states,
            checks.suspect,
            housekeeping.disk_bytes,
            external.accept,
        )
        store.skip_used_ids(options.state / "jobs")
        manager.recover()
        for part in (launches, checks, external, manager):  # the manager's first pass knows what other launches use
            part.start()
            stack.callback(part.close)
        self._problem = manager.problem

        def wake() -> None:
            manager.wake()
            external.wake()

        def kill(id: int) -> None:
            job = store.job(id)
            on_hosts = job is None or job.engine is Engine.HOSTS
            (manager if on_hosts else external).kill(id)

        actions = Actions(store, checker, options.runs, wake, kill)
        return parts.Queue(actions, manager, launches.taken, checks.states)


def _make_folder(option: str, folder: Path, mode: int | None = None) -> None:
    """Make the folder of an option, with these rights also where it exists. Raises `UserError`."""
    try:
        make_own_folder(folder)
        if mode is not None:
            folder.chmod(mode)
    except OSError as error:
        raise UserError(f"{option} {folder}: cannot be used as a folder: {error.strerror}") from None


def _busy(store: Store) -> set[str]:
    return {part.host for attempt in store.open_attempts() for part in attempt.allocation}
