"""The results of an examination as a table (a row per host, then the findings) or as JSON."""

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hvd_transformer.launch.doctor.examine import Examination
from hvd_transformer.launch.doctor.findings import GIB, Answer, gigabits


def as_table(found: Examination, hosts: list[str]) -> Group:
    """A renderable for rich's console; `hosts` gives the order of the rows."""
    software = {host: _software(answer) for host, answer in found.answers.items()}
    same = len(set(software.values())) == 1
    columns = ["host", "devices", "cores", "memory free", "disk free", "clock"]
    columns += ["from previous host"] if found.links else []
    columns += [] if same else ["software"]
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    faulty = {finding.host for finding in found.findings if finding.problem}
    for host in hosts:
        name = Text(host, "bold red" if host in faulty else "green")
        cells = list(_cells(found, host)) if host in found.answers else ["no answer"]
        table.add_row(name, *cells, *([] if same or host not in software else [software[host]]))
    common = [Text(f"on all hosts: {next(iter(software.values()))}")] if same else []
    return Group(table, *common, *_network(found.common), *_gpus(found), *_lines(found))


def to_json(found: Examination) -> dict[str, Any]:
    """JSON values: sizes in bytes, times in seconds, rates in bytes per second."""
    return {
        "hosts": {host: {**answer, "clock": found.skews.get(host)} for host, answer in found.answers.items()},
        "interfaces": found.common,
        "links": [link._asdict() for link in found.links],
        "gpu_allreduces": {host: str(result) for host, result in found.gpu_allreduces.items()},
        "findings": [finding._asdict() for finding in found.findings],
    }


def _software(answer: Answer) -> str:
    versions = answer["versions"]
    horovod = " ".join(answer["horovod"]["features"]) if answer["horovod"] else "not built"
    words = [f"Python {answer['python']}", f"torch {versions['torch']}", f"horovod {versions['horovod']} ({horovod})"]
    if answer["mpi4py"]:
        words += [f"mpi4py {versions['mpi4py']}", answer["mpi4py"]["version"]]
    return ", ".join(words)


def _cells(found: Examination, host: str) -> Iterator[str]:
    answer = found.answers[host]
    yield "\n".join(f"{device['name']}, {_gib(device['memory_free'])}" for device in answer["devices"]) or "none"
    yield " ".join([str(answer["cores"]), *answer["number_formats"]])
    yield f"{_gib(answer['memory_free'])} of {_gib(answer['memory'])}"
    yield "\n".join(f"{_gib(answer['folders'][label]['free'])} {label}" for label in ("output_dir", "/tmp"))
    yield f"{found.skews[host][0] * 1000:+.1f} ms" if host in found.skews else ""
    link = next((link for link in found.links if link.target == host), None)
    if link and link.rate is not None and link.round_trip is not None:
        yield f"{gigabits(link.rate)}, {link.round_trip * 1e3:.2g} ms round trip"
    elif found.links:
        yield ""


def _network(common: list[str]) -> Iterator[Text]:
    """The interface of the ranks, if they are on several hosts."""
    if common:
        others = ", ".join(common[1:])
        also = f" (the hosts also share {others}: choose with --network-interface)" if others else ""
        yield Text(f"network interface: {common[0]}{also}")


def _gpus(found: Examination) -> Iterator[Text]:
    """One line for each result that is no problem, and the hosts that have it."""
    hosts: dict[str, list[str]] = {}
    for host, result in found.gpu_allreduces.items():
        if result.error is None:
            hosts.setdefault(str(result), []).append(host)
    for words, those in hosts.items():
        where = "" if len(those) == len(found.answers) else f" ({', '.join(those)})"
        yield Text(f"allreduce of two GPUs: {words}{where}")


def _lines(found: Examination) -> Iterator[Text]:
    for finding in sorted(found.findings, key=lambda finding: not finding.problem):
        word, style = ("problem", "bold red") if finding.problem else ("note", "yellow")
        yield Text.assemble((word, style), f" {finding.host}: {finding.message}\n", ("  → ", "dim"), finding.cure)
    if not found.findings:
        yield Text("no problems found", "green")


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
