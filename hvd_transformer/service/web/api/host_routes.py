"""The API of hosts: which jobs are where, and what admins do with hosts."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from hvd_transformer.service.launching.host_checks import HostState
from hvd_transformer.service.runs.index import run_id
from hvd_transformer.service.storage.tokens import Role
from hvd_transformer.service.web.api import models
from hvd_transformer.service.web.api.routes import BASE, Call, Route
from hvd_transformer.service.web.parts import Queue, Service

_OUTSIDE = "a launch outside the queue"


def list_hosts(call: Call) -> models.Hosts:
    return _hosts(call.service)


def add_hosts(call: Call) -> models.Hosts:
    _queue(call).actions.add_hosts(call.body.hosts, call.body.gpus)
    return _hosts(call.service)


def drain(call: Call) -> models.Hosts:
    return _change(call, _queue(call).actions.drain)


def resume(call: Call) -> models.Hosts:
    return _change(call, _queue(call).actions.resume)


def remove(call: Call) -> models.Hosts:
    return _change(call, _queue(call).actions.remove_host)


def _change(call: Call, action: Callable[[str], object]) -> models.Hosts:
    action(call.path["name"])
    return _hosts(call.service)


def _queue(call: Call) -> Queue:
    assert call.service.queue is not None  # Route.needs_queue
    return call.service.queue


def _hosts(service: Service) -> models.Hosts:
    used = uses(service)
    states = {} if service.queue is None else service.queue.host_states()
    items = []
    for host in service.store.hosts():
        state = states.get(host.name, HostState())
        items.append(
            models.Host(
                **{**vars(host), "gpus": list(host.gpus)},
                used=used[host.name],
                load=state.load,
                findings=list(state.findings),
            )
        )
    return models.Hosts(items=items)


def uses(service: Service) -> dict[str, list[models.Use]]:
    """What each host is used for."""
    found: dict[str, list[models.Use]] = defaultdict(list)
    for attempt in service.store.open_attempts():
        job = service.store.job(attempt.job)
        if job is None:  # forgotten meanwhile
            continue
        run = run_id(Path(job.output_dir))
        for part in attempt.allocation:
            use = models.Use(
                job=job.id, run=run, ranks=part.ranks, gpus=list(part.gpus), owner=job.owner, name=job.name
            )
            found[part.host].append(use)
    known = {host.name: host.gpus for host in service.store.hosts()}
    for part in () if service.queue is None else service.queue.taken():
        # A launcher without training.device=cpu names GPUs, also on hosts that have none.
        gpus = [gpu for gpu in part.gpus if gpu in known.get(part.host, ())]
        use = models.Use(job=None, run=None, ranks=part.ranks, gpus=gpus, owner="", name=_OUTSIDE)
        found[part.host].append(use)
    return found


def _action(name: str, handler: Callable[[Call], models.Hosts], summary: str) -> Route:
    return Route(
        "POST",
        f"{BASE}/hosts/{{name}}/{name}",
        Role.ADMIN,
        handler,
        summary,
        models.Hosts,
        body=models.Nothing,
        refused=409,
        needs_queue=True,
    )


ROUTES = [
    Route("GET", f"{BASE}/hosts", Role.VIEW, list_hosts, "Hosts, and which jobs are there.", models.Hosts),
    Route(
        "POST",
        f"{BASE}/hosts",
        Role.ADMIN,
        add_hosts,
        "Add hosts, or change their slots and GPUs.",
        models.Hosts,
        body=models.AddHosts,
        needs_queue=True,
    ),
    _action("drain", drain, "Give a host no new job."),
    _action("resume", resume, "Let a drained host have jobs again."),
    _action("remove", remove, "Forget a host that no job uses."),
]
