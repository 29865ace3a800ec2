"""All parts of a service put together: the queue over its hosts, the runs that it shows, and the web server."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hvd_transformer.own_folder import make_own_folder, user_name
from hvd_transformer.service.actions import Actions
from hvd_transformer.service.housekeeping import Housekeeping
from hvd_transformer.service.jobs import ENDED, Host, Job
from hvd_transformer.service.launching.attempts import Launchers
from hvd_transformer.service.launching.host_checks import HostChecks
from hvd_transformer.service.launching.plain_launches import PlainLaunches
from hvd_transformer.service.manager import Manager
from hvd_transformer.service.remote.address import DATABASE
from hvd_transformer.service.runs.index import RunIndex, run_id
from hvd_transformer.service.runs.launcher_beats import LauncherBeats
from hvd_transformer.service.runs.metrics.curves import Curves
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.storage.tokens import Role, Tokens
from hvd_transformer.service.submitting.checker import Checker
from hvd_transformer.service.web import parts
from hvd_transformer.service.web.app import create_app
from hvd_transformer.service.web.listening import Listening
from hvd_transformer.service.web.server import WebServer
from hvd_transformer.service.webhook import Webhook

_LINK, _LINK_SECONDS = "link of serve", 86_400.0  # the token in the address that `serve` prints


@dataclass(frozen=True)
class Options:
    """The options of `serve`. `hosts`: to add; a service that never had a host only shows runs.

    `limits`: those of every user that are to change, by the names of `Limits`.
    """

    state: Path
    runs: Path
    listening: Listening
    hosts: Sequence[Host] = ()
    webhook: str | None = None
    retention_days: float | None = None
    limits: Mapping[str, int | None] = field(default_factory=dict)


class TrainingService:
    """From construction to `close`; `run` serves until the process is told to end. Jobs go on without it.

    Raises `UserError` if another service has the state folder, or for what cannot be used.
    """

    def __init__(self, options: Options) -> None:
        with ExitStack() as stack:
            make_own_folder(options.state)
            options.state.chmod(0o700)
            make_own_folder(options.runs)
            self._store = store = Store(options.state / DATABASE)
            stack.callback(store.close)
            store.put_hosts(options.hosts)
            if options.retention_days is not None:
                store.set_retention_days(options.retention_days)
            if limits := {key: value for key, value in options.limits.items() if value is not None}:
                store.set_limits(replace(store.all_limits()[None], **limits))
            self._tokens, runs, beats = Tokens(store.database), RunIndex(options.runs), LauncherBeats()
            stack.callback(beats.close)
            curves = Curves()
            housekeeping = Housekeeping(store, runs, curves, options.state)
            self._problem: Callable[[], str | None] = lambda: None
            queue = self._queue(options, runs, housekeeping, stack) if store.hosts() else None
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
        """The address of the pages with a token, which makes its user an admin for a day. Earlier ones end."""
        for token in self._tokens.list():
            if token.name == _LINK:
                self._tokens.revoke(token.id)
        secret = self._tokens.add(_LINK, user_name(os.geteuid()), Role.ADMIN, time.time() + _LINK_SECONDS)
        return f"{self._server.url}/#token={secret}"

    def _queue(self, options: Options, runs: RunIndex, housekeeping: Housekeeping, stack: ExitStack) -> parts.Queue:
        """The queue, with its threads running."""
        store, launchers, checker = self._store, Launchers(options.state), Checker(options.state / "code")
        stack.callback(checker.close)
        stack.callback(launchers.close)
        webhook = None
        if options.webhook is not None:
            webhook = Webhook(options.webhook)
            stack.callback(webhook.close)

        def ended(job: Job) -> None:
            if webhook is not None and job.state in ENDED:
                webhook.tell(news(job))

        checks = HostChecks(store.hosts, options.runs, lambda: _busy(store), lambda: manager.wake())
        launches = PlainLaunches(launchers.pids, lambda: [host.name for host in store.hosts()], lambda: manager.wake())
        manager = Manager(
            store,
            launchers,
            lambda run: runs.progress(run).seconds_left,
            launches.taken,
            checks.states,
            checks.suspect,
            ended,
            housekeeping.disk_bytes,
        )
        manager.recover()
        for part in (launches, checks, manager):  # the manager's first pass knows what other launches use
            part.start()
            stack.callback(part.close)
        self._problem = manager.problem
        actions = Actions(store, checker, options.runs, manager.wake, manager.kill)
        return parts.Queue(actions, manager, launches.taken, checks.states)


def news(job: Job) -> dict[str, Any]:
    """What the webhook is told of a job that has ended."""
    run = {"run": run_id(Path(job.output_dir)), "output_dir": job.output_dir}
    return {
        **{key: getattr(job, key) for key in ("id", "name", "owner", "reason", "submitted", "ended")},
        "state": job.state.value,
        **run,
    }


def _busy(store: Store) -> set[str]:
    return {part.host for attempt in store.open_attempts() for part in attempt.allocation}
