"""GET /metrics, in Prometheus' text format. The number of series grows with the hosts, never with jobs or runs."""

from collections import Counter
from collections.abc import Iterable, Iterator

from starlette.responses import Response

from hvd_transformer.service.histogram import Histogram
from hvd_transformer.service.jobs import Host, State
from hvd_transformer.service.runs.status import RunStatus
from hvd_transformer.service.storage.tokens import Role
from hvd_transformer.service.web.api.host_routes import uses
from hvd_transformer.service.web.api.routes import Call, Route
from hvd_transformer.service.web.parts import Service

TEXT = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "hvd_transformer"
_Sample = tuple[dict[str, str], float]


def metrics(call: Call) -> Response:
    return Response("".join(_lines(call.service)), headers={"Content-Type": TEXT})


def _lines(service: Service) -> Iterator[str]:
    runs = Counter(row.status for row in service.runs.rows())
    yield from _gauge("runs", "Run directories by status.", (({"status": s.value}, runs[s]) for s in RunStatus))
    queue = service.queue
    if queue is None:
        return
    jobs = service.store.counts()
    yield from _gauge("jobs", "Jobs by state.", (({"state": s.value}, jobs.get(s, 0)) for s in State))
    yield from _hosts(service, service.store.hosts())
    waits, passes = queue.manager.wait_seconds, queue.manager.pass_seconds
    yield from _histogram("queue_wait_seconds", "From a job's submission to its start.", waits)
    yield from _histogram("scheduler_pass_seconds", "Duration of a pass of the scheduler.", passes)


def _hosts(service: Service, hosts: list[Host]) -> Iterator[str]:
    used = {name: sum(use.ranks for use in of_host) for name, of_host in uses(service).items()}
    named = [({"host": host.name}, host) for host in hosts]
    yield from _gauge("host_slots", "Slots of a host.", ((labels, host.slots) for labels, host in named))
    yield from _gauge(
        "host_slots_used", "Slots of a host in use.", ((labels, used.get(host.name, 0)) for labels, host in named)
    )
    yield from _gauge("host_drained", "1: takes no new job.", ((labels, host.drained) for labels, host in named))
    yield from _gauge("host_down", "1: cannot be used.", ((labels, bool(host.down)) for labels, host in named))


def _gauge(name: str, help_text: str, samples: Iterable[_Sample]) -> Iterator[str]:
    yield f"# HELP {_PREFIX}_{name} {help_text}\n# TYPE {_PREFIX}_{name} gauge\n"
    yield from (_sample(name, labels, value) for labels, value in samples)


def _histogram(name: str, help_text: str, histogram: Histogram) -> Iterator[str]:
    counts = histogram.counts()
    yield f"# HELP {_PREFIX}_{name} {help_text}\n# TYPE {_PREFIX}_{name} histogram\n"
    for bound, number in zip(counts.bounds, counts.at_most, strict=True):
        yield _sample(f"{name}_bucket", {"le": f"{bound:g}"}, number)
    yield _sample(f"{name}_bucket", {"le": "+Inf"}, counts.total)
    yield _sample(f"{name}_sum", {}, counts.sum)
    yield _sample(f"{name}_count", {}, counts.total)


def _sample(name: str, labels: dict[str, str], value: float) -> str:
    text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
    return f"{_PREFIX}_{name}{{{text}}} {float(value):.10g}\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


ROUTES = [Route("GET", "/metrics", Role.VIEW, metrics, "For Prometheus: a Bearer token is its credentials.", text=TEXT)]
