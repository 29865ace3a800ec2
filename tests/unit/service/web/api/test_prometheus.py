"""GET /metrics, read as Prometheus reads it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from web_service import Running, running

from hvd_transformer.service.jobs import Host, Placement
from hvd_transformer.service.storage.tokens import Role

SAMPLE = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-z]+="(?:[^"\\\n]|\\\\|\\"|\\n)*",?)*)\} ([-+0-9.eE]+|\+Inf|NaN)'
)
LABEL = re.compile(r'([a-z]+)="((?:[^"\\]|\\.)*)"')


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as found:
        yield found


def scrape(service: Running) -> dict[tuple[str, ...], float]:
    """Values by name and labels. Each sample must have a type, and each series one value."""
    answer = service.request("GET", "/metrics", token=service.token("prometheus", Role.VIEW))
    assert (answer.status, answer.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    values: dict[tuple[str, ...], float] = {}
    types: dict[str, str] = {}
    for line in answer.body.decode().split("\n")[:-1]:
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in types
            types[name] = kind
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            name, labels, value = match.groups()
            assert re.sub(r"_(bucket|sum|count)$", "", name) in types or name in types
            key = (name, *(text for pair in LABEL.findall(labels) for text in pair))
            assert key not in values
            values[key] = float(value)
    return values


def test_jobs_hosts_and_runs(service: Running) -> None:
    token = service.token("ann")
    service.submit(token)
    number = service.submit(token, num_ranks=3)["id"]
    service.store.start(number, (Placement("h1", 2), Placement("h2", 1)), 5.0)
    service.taken.append(Placement("h2", 2))
    service.store.set_drained("h2", True)
    service.make_run("run")
    values = scrape(service)
    assert values["hvd_transformer_jobs", "state", "QUEUED"] == 1
    assert values["hvd_transformer_jobs", "state", "STARTING"] == 1
    assert values["hvd_transformer_jobs", "state", "FAILED"] == 0
    assert [values["hvd_transformer_host_slots", "host", host] for host in ("h1", "h2")] == [4, 4]
    assert [values["hvd_transformer_host_slots_used", "host", host] for host in ("h1", "h2")] == [2, 3]
    assert [values["hvd_transformer_host_drained", "host", host] for host in ("h1", "h2")] == [0, 1]
    assert sum(value for key, value in values.items() if key[0] == "hvd_transformer_runs") == 1


def test_histograms_count_up(service: Running) -> None:
    for seconds in (0.5, 1.0, 30.0, 1000.0):
        service.manager.wait_seconds.observe(seconds)
    values = scrape(service)
    name = "hvd_transformer_queue_wait_seconds"
    assert [values[f"{name}_bucket", "le", bound] for bound in ("1", "60", "+Inf")] == [2, 3, 4]
    assert (values[f"{name}_sum",], values[f"{name}_count",]) == (1031.5, 4)


def test_names_cannot_forge_samples(service: Running) -> None:
    name = 'h"} 1\nforged{a="\\'
    service.store.put_hosts([Host(name, 7)])
    values = scrape(service)
    escaped = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    assert values["hvd_transformer_host_slots", "host", escaped] == 7
    assert not any(key[0] == "forged" for key in values)


def test_the_number_of_series_does_not_grow_with_jobs_and_runs(service: Running) -> None:
    before = scrape(service).keys()
    for number in range(5):
        service.submit(service.token("ann"))
        service.make_run(f"run-{number}")
    assert scrape(service).keys() == before


def test_a_tracker_has_no_queue(tmp_path: Path) -> None:
    (tmp_path / "tracker").mkdir()
    with running(tmp_path / "tracker", queue=False) as service:
        assert {key[0] for key in scrape(service)} == {"hvd_transformer_runs"}
