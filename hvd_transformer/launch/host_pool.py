"""Which hosts a job may use now: the given ones or those that a discovery script names, less those set aside."""

import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hvd_transformer.errors import UserError
from hvd_transformer.launch.hostfile import Host, assign, parse_hostfile, parse_hosts, read_hostfile

ASIDE_SECONDS = 10.0  # that a lost host is left alone for; twice as long each time it is lost again
_MAX_ASIDE_SECONDS = 600.0
_SCRIPT_SECONDS = 30.0

FindHosts = Callable[[], list[Host]]


class HostPool:
    """The hosts of a job over its restarts.

    `num_ranks`: at most so many slots are used; None: all. Always a multiple of `tensor`, the ranks that share
    matrices.
    """

    def __init__(self, find: FindHosts, num_ranks: int | None, tensor: int = 1) -> None:
        if num_ranks is not None and num_ranks % tensor:
            raise UserError(f"-np {num_ranks}: must be a multiple of parallel.tensor={tensor}")
        self._find, self._num_ranks, self._tensor = find, num_ranks, tensor
        self._aside: dict[str, tuple[float, float]] = {}  # until when, and for how long it was

    def hosts(self) -> list[Host]:
        """Those to use now, with their slots trimmed to the number of ranks; perhaps none.

        Raises `UserError` where the discovery script fails.
        """
        now = time.monotonic()
        found = [host for host in self._find() if self._aside.get(host.name, (0.0, 0.0))[0] <= now]
        slots = sum(host.slots for host in found)
        count = slots if self._num_ranks is None else min(slots, self._num_ranks)
        return assign(found, count - count % self._tensor)

    def set_aside(self, name: str) -> float:
        """Leaves a host alone for a while; how long, in seconds."""
        seconds = min(2 * self._aside.get(name, (0.0, ASIDE_SECONDS / 2))[1], _MAX_ASIDE_SECONDS)
        self._aside[name] = (time.monotonic() + seconds, seconds)
        return seconds


def find_hosts(
    num_ranks: int | None,
    hosts: str | None,
    hostfile: Path | None,
    script: Path | None,
    environment: Mapping[str, str],
    tensor: int = 1,
) -> FindHosts:
    """How to find the hosts that -H, --hostfile or --host-discovery-script gives; without them it is this one, with a
    rank, or as many as share matrices.

    Raises `UserError` for more than one of them, and where what is given cannot be read or has too few slots.
    """
    if sum(given is not None for given in (hosts, hostfile, script)) > 1:
        raise UserError("-H, --hostfile and --host-discovery-script: give one of them")
    if script is not None:
        return from_script(script, environment)
    if hosts is not None:
        fixed = parse_hosts(hosts)
    elif hostfile is not None:
        fixed = read_hostfile(hostfile)
    else:
        fixed = [Host("localhost", num_ranks or tensor)]
    if num_ranks is not None:
        assign(fixed, num_ranks)  # refuses too few slots; hosts beyond them stand by
    return fixed.copy


def resolve_min_ranks(min_ranks: int | None, num_ranks: int | None, slots: int, tensor: int = 1) -> int:
    """How few ranks the job goes on with, by --min-np, -np and the slots of the hosts of now, in groups of `tensor`.

    Raises `UserError` for a number that cannot be, or where there are fewer slots now.
    """
    if tensor > 1 and slots == 0:
        raise UserError(f"the hosts have fewer slots now than the parallel.tensor={tensor} ranks of one replica")
    most = slots if num_ranks is None else num_ranks
    if min_ranks is not None and not 1 <= min_ranks <= most:
        raise UserError(f"--min-np {min_ranks}: must be from 1 to the number of ranks, {most}")
    least = min_ranks or max(1, most)
    if slots < least:
        raise UserError(f"the hosts have {slots} slots now, {least} are needed")
    return least


def from_script(script: Path, environment: Mapping[str, str]) -> FindHosts:
    """What a discovery script prints: a host file's lines, as Horovod's elastic mode asks for too.

    Raises `UserError` where the file cannot be run. The function does where a run fails or takes too long, or for a
    malformed line; no line at all means that there is no host now.
    """
    name = f"--host-discovery-script {script}"
    path = script.expanduser().absolute()
    if not path.is_file():
        raise UserError(f"{name}: no such file")

    def find() -> list[Host]:
        try:
            done = subprocess.run(
                [path], env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, timeout=_SCRIPT_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"{name}: did not end within {_SCRIPT_SECONDS:.0f} seconds") from None
        except OSError as error:
            raise UserError(f"{name}: cannot be run: {error.strerror}") from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
            raise UserError(f"{name}: exit code {done.returncode}: {said[-1]}")
        text = done.stdout.decode(errors="replace")
        return parse_hostfile(text, name) if text.strip() else []

    return find
