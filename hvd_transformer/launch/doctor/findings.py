"""What the hosts' answers mean: pure functions from answers to findings.

An answer is what `probe.facts` returns. If hosts differ, the finding names those that differ from the majority; without
a majority, those that differ from the first host.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from hvd_transformer.config import Config
from hvd_transformer.config.schema import DataConfig
from hvd_transformer.errors import UserError
from hvd_transformer.launch.horovodrun_command import Horovodrun
from hvd_transformer.launch.hostfile import Host

Answer = Mapping[str, Any]
Answers = Mapping[str, Answer]
Interfaces = Mapping[str, Mapping[str, str]]  # host → name → address

MIB, GIB = 1 << 20, 1 << 30
_FULL_DISK = 16 * MIB
_LITTLE = GIB  # memory or disk
_CLOCK_SECONDS = 1.0
_SLOW_LINK = 0.25  # fraction of the fastest link's bandwidth
_INSTALL = {
    "hvd-transformer": "install the same package there, for example from the same checkout",
    "torch": "install the same version there: `pip install torch=={wanted}`",
    "horovod": "run docker/build_horovod.sh there and install its wheel",
    "mpi4py": "install the same version there: `pip install mpi4py=={wanted}`",
}


class Finding(NamedTuple):
    """Something that is wrong with a host, and what to do. `problem`: it prevents a job from running."""

    host: str
    message: str
    cure: str
    problem: bool = True

    def __str__(self) -> str:
        return f"host {self.host}: {self.message}; {self.cure}"


class Job(NamedTuple):
    """What the hosts are to run."""

    hosts: Sequence[Host]
    stages: int  # pipeline stages, and so devices, per rank
    device: str  # auto, cpu or cuda
    cwd: str
    folders: Mapping[str, str]  # by the name that the user knows them by
    network_interface: str | None = None
    precision: str = "fp32"
    is_given: bool = True  # False: only the hosts are

    @classmethod
    def of(cls, horovodrun: Horovodrun, config: Config, trains: bool = True) -> "Job":
        """The job as started from the current folder. Without `trains` it writes nothing to `output_dir`."""
        folders = {
            **({"output_dir": config.output_dir} if trains else {}),
            **_sources(config.data),
            "data.cache_dir": config.data.cache_dir,
            **({} if config.model.pretrained is None else {"model.pretrained": config.model.pretrained}),
            "/tmp": "/tmp",
        }
        stages, device = config.parallel.pipeline, config.training.device
        interface, precision = horovodrun.network_interface, config.training.precision
        return cls(horovodrun.hosts, stages, device, str(Path.cwd()), folders, interface, precision)


def _sources(data: DataConfig) -> dict[str, str]:
    if data.sources is None:
        return {"data.source": data.source}
    return {f"data.sources, entry {number}": str(one["source"]) for number, one in enumerate(data.sources, start=1)}


class Link(NamedTuple):
    """The network link from a host to the next one in the ring."""

    source: str
    target: str
    round_trip: float | None  # seconds
    rate: float | None  # bytes per second
    error: str | None


def about_hosts(job: Job, answers: Answers) -> Iterator[Finding]:
    """Findings about software, folders and memory."""
    yield from _software(answers)
    yield from _folders(job, answers)
    for host, answer in answers.items():
        if answer["memory_free"] < _LITTLE:
            free = f"only {answer['memory_free'] // MIB} MiB of memory are free"
            yield Finding(host, free, "check what else runs there", problem=False)


def about_network(wanted: str | None, interfaces: Interfaces) -> Iterator[Finding]:
    """Which hosts to fix if there are no `common_interfaces`."""
    if common_interfaces(wanted, interfaces):
        return
    allowed = None if wanted is None else set(wanted.split(","))
    names = (name for found in interfaces.values() for name in found if allowed is None or name in allowed)
    usual = Counter(names).most_common(1)
    apart = [host for host, found in interfaces.items() if not usual or usual[0][0] not in found]
    for host in apart or interfaces:
        cure = "choose one that all hosts have with --network-interface"
        if allowed is None:
            lacking = "no network interface in common with the others"
            cure = "give the network interface the same name on each host: horovodrun selects interfaces by name"
        elif allowed & interfaces[host].keys():
            lacking = f"none of the network interfaces {wanted} in common with the others"
        else:
            lacking = f"no network interface {wanted}"
        yield Finding(host, f"{lacking}: it has {', '.join(interfaces[host]) or 'none'}", cure)


def common_interfaces(
    wanted: str | None, interfaces: Interfaces, reached: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """The interfaces that all hosts have, with a different address on each; in the order of `wanted`, if given, else
    the one that ssh uses first. `reached`: the address at which ssh reached each remote host.

    A bridge such as docker0 has the same address everywhere and connects nothing.
    """
    result = []
    for name in wanted.split(",") if wanted is not None else next(iter(interfaces.values())):
        addresses = {found[name] for found in interfaces.values() if name in found}
        if len(addresses) == len(interfaces):
            result.append(name)
    if wanted is None:
        used = (name for host, address in reached.items() for name in result if interfaces[host][name] == address)
        first = next(used, None)
        result.sort(key=lambda name: name != first)
    return result


def choose_interfaces(wanted: str | None, interfaces: Interfaces, reached: Mapping[str, str]) -> str:
    """The interfaces for the ranks: those of `wanted` that all hosts have, or else the one that ssh uses.

    Raises `UserError`, which names a host to fix.
    """
    for finding in about_network(wanted, interfaces):
        raise UserError(str(finding))
    common = common_interfaces(wanted, interfaces, reached)
    return common[0] if wanted is None else ",".join(common)


def about_clocks(skews: Mapping[str, tuple[float, float]]) -> Iterator[Finding]:
    """`skews`: seconds by which each host's clock is ahead of the launcher's, and the uncertainty."""
    for host, (skew, uncertainty) in skews.items():
        if abs(skew) - uncertainty > _CLOCK_SECONDS:
            message = f"its clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this host's"
            yield Finding(host, message, "synchronize the clocks with NTP: chronyd or systemd-timesyncd on all hosts")


def about_sharing(output: str, seen: Mapping[str, bool]) -> Iterator[Finding]:
    """`seen`: whether each host sees a file that the launcher created in the output folder."""
    for host, sees_it in seen.items():
        if not sees_it:
            cure = "set output_dir to a folder on a file system that all hosts share, such as NFS"
            yield Finding(host, f"output_dir={output} is another folder there than here", cure)


def about_links(interface: str, links: Iterable[Link]) -> Iterator[Finding]:
    """Links that do not connect, and links that are far slower than the rest."""
    links = list(links)
    fastest = max((link.rate or 0 for link in links), default=0)
    for link in links:
        if link.error is not None:
            message = f"{link.source} cannot connect to it over {interface}: {link.error}"
            cure = "open all TCP ports between the hosts in their firewalls, or choose another --network-interface"
            yield Finding(link.target, message, cure)
        elif link.rate is not None and link.rate < _SLOW_LINK * fastest:
            message = f"the link from {link.source} over {interface} has {gigabits(link.rate)}, another link has "
            cure = "check its cable, switch port and other traffic: the slowest link limits all ranks"
            yield Finding(link.target, message + gigabits(fastest), cure, problem=False)


def gigabits(rate: float) -> str:
    """A rate in bytes per second, as text."""
    return f"{8 * rate / 1e9:.3g} Gbit/s"


def _software(answers: Answers) -> Iterator[Finding]:
    pythons = {host: answer["python"] for host, answer in answers.items()}
    yield from _differing("Python", pythons, "install Python {wanted} under this path there too")
    for name, cure in _INSTALL.items():
        versions = {host: answer["versions"][name] for host, answer in answers.items()}
        required = name != "mpi4py" or any(versions.values())
        lacking = [host for host, version in versions.items() if required and version is None]
        wanted = most_common({host: version for host, version in versions.items() if version})
        for host in lacking:
            missing = cure.format(wanted=wanted) if wanted else f"install {name} there"
            yield Finding(host, f"{name} is not installed", missing)
        yield from _differing(name, {host: v for host, v in versions.items() if host not in lacking}, cure)
    sources = {host: answer["source"] for host, answer in answers.items() if answer["source"]}
    yield from _differing("the source of hvd-transformer", sources, _INSTALL["hvd-transformer"])
    for host, answer in answers.items():
        yield from _build(host, answer)
    built = {host: " ".join(answer["horovod"]["features"]) for host, answer in answers.items() if answer.get("horovod")}
    yield from _differing("what Horovod was built with", built, _INSTALL["horovod"])


def _build(host: str, answer: Answer) -> Iterator[Finding]:
    """Whether Horovod, torch and MPI of one host fit together."""
    rebuild = "rebuild Horovod there for what is installed: docker/build_horovod.sh"
    horovod, mpi4py, torch = answer.get("horovod"), answer.get("mpi4py"), answer["versions"]["torch"]
    if horovod is None:
        return
    if horovod["torch"] and torch and horovod["torch"] != torch:
        yield Finding(host, f"Horovod was built for torch {horovod['torch']}, and torch {torch} is installed", rebuild)
    if "MPI" in horovod["features"] and mpi4py and horovod["mpi"] != mpi4py["mpi"]:
        message = f"Horovod loads the MPI library {horovod['mpi']}, mpi4py {mpi4py['mpi']}"
        yield Finding(host, message, "install a single MPI and check LD_LIBRARY_PATH; " + rebuild)


def _folders(job: Job, answers: Answers) -> Iterator[Finding]:
    for host, answer in answers.items():
        if not answer["cwd"]:
            cure = "start from a folder that all hosts have, or create it there"
            yield Finding(host, f"the folder {job.cwd} is not there", cure)
        for label, folder in answer["folders"].items():
            where = label if label == job.folders[label] else f"{label}={job.folders[label]}"
            if label.startswith("data.source") or label == "model.pretrained":
                if not folder["exists"] and any(other["folders"][label]["exists"] for other in answers.values()):
                    cure = "copy it there, or keep it on a file system that all hosts share"
                    yield Finding(host, f"{where} is not there", cure)
            elif not folder["writable"]:
                cure = "change its owner or mode, or choose another folder"
                yield Finding(host, f"{where} cannot be written to", cure)
            elif folder["free"] < _FULL_DISK:
                yield Finding(host, f"the disk of {where} is full", "free some space there, or choose another folder")
            elif folder["free"] < _LITTLE:
                free = f"only {folder['free'] // MIB} MiB are free for {where}"
                yield Finding(host, free, "free some space there, or choose another folder", problem=False)


def _differing(what: str, values: Mapping[str, str], cure: str) -> Iterator[Finding]:
    wanted = most_common(values)
    for host, value in values.items():
        if value != wanted:
            like = [other for other in values if values[other] == wanted]
            others = f"{like[0]} and {len(like) - 1} more" if len(like) > 1 else like[0]
            message = f"{what} is {value}, but {wanted} on {others}"
            yield Finding(host, message, cure.format(wanted=wanted))


def most_common(values: Mapping[str, str]) -> str | None:
    """The most frequent value; the first one in case of a tie."""
    return Counter(values.values()).most_common(1)[0][0] if values else None
