"""The hosts that a job may use now: from the command line or a discovery script, without those that cool down."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from hvd_transformer.errors import UserError
from hvd_transformer.launch.hostfile import Host, assign, parse_hostfile, parse_hosts, read_hostfile

COOL_DOWN_SECONDS = 10.0  # for which a lost host is excluded; doubled each time it is lost again
_MOST_SECONDS = 640.0
_SCRIPT_SECONDS = 30.0
_LOOK_SECONDS = 0.02
_READ_BYTES = 1 << 20  # more than a pipe holds

FindHosts = Callable[[], list[Host]]


class HostPool:
    """The hosts of a job across its restarts.

    `num_ranks` limits the number of slots that are used (None: no limit), always to a multiple of `tensor`, the size of
    a tensor-parallel group. Raises `UserError` if `num_ranks` is not such a multiple.
    """

    def __init__(self, find: FindHosts, num_ranks: int | None, tensor: int = 1) -> None:
        if num_ranks is not None and num_ranks % tensor:
            raise UserError(f"-np {num_ranks}: must be a multiple of parallel.tensor={tensor}")
        self._find, self._num_ranks, self._tensor = find, num_ranks, tensor
        self._cooling: dict[str, tuple[float, float]] = {}  # excluded until when, and for how many seconds

    def hosts(self, without: str | None = None) -> list[Host]:
        """The hosts to use now, their slots trimmed to the number of ranks; may be empty.

        Raises `UserError` if the discovery script fails.
        """
        now = time.monotonic()
        usable = (host for host in self._find() if self._cooling.get(host.name, (0.0, 0.0))[0] <= now)
        found = [host for host in usable if host.name != without]
        slots = sum(host.slots for host in found)
        count = slots if self._num_ranks is None else min(slots, self._num_ranks)
        return assign(found, count - count % self._tensor)

    def cool_down(self, name: str) -> float:
        """Exclude a host for a while; return for how many seconds."""
        seconds = min(2 * self._cooling.get(name, (0.0, COOL_DOWN_SECONDS / 2))[1], _MOST_SECONDS)
        self._cooling[name] = (time.monotonic() + seconds, seconds)
        return seconds


def find_hosts(
    num_ranks: int | None,
    hosts: str | None,
    hostfile: Path | None,
    script: Path | None,
    environment: Mapping[str, str],
    tensor: int = 1,
) -> FindHosts:
    """A function that returns the hosts of -H, --hostfile or --host-discovery-script. Default: localhost with
    `num_ranks` slots, or one tensor-parallel group.

    Raises `UserError` if more than one of the options is given, and if the hosts cannot be read or have too few slots.
    """
    if script is not None:
        if hosts is not None or hostfile is not None:
            raise UserError("-H, --hostfile and --host-discovery-script: give only one of them")
        return from_script(script, environment)
    fixed = given_hosts(hosts, hostfile, num_ranks or tensor)
    if num_ranks is not None:
        assign(fixed, num_ranks)  # refuses too few slots; surplus hosts stand by
    return fixed.copy


def given_hosts(hosts: str | None, hostfile: Path | None, local_slots: int = 1) -> list[Host]:
    """The hosts of -H or --hostfile; without either, localhost with `local_slots`.

    Raises `UserError` if both are given, and for malformed hosts.
    """
    if hosts is not None and hostfile is not None:
        raise UserError("-H and --hostfile: give only one of them")
    if hosts is not None:
        return parse_hosts(hosts)
    return [Host("localhost", local_slots)] if hostfile is None else read_hostfile(hostfile)


def resolve_min_ranks(min_ranks: int | None, num_ranks: int | None, slots: int, tensor: int = 1) -> int:
    """The fewest ranks that the job may run with: --min-np, by default -np or the slots that the hosts have now.

    Raises `UserError` for a number out of range, or if the hosts have fewer slots now. `tensor` is the size of a
    tensor-parallel group.
    """
    if tensor > 1 and slots == 0:
        raise UserError(f"the hosts now have fewer slots than the parallel.tensor={tensor} ranks of one replica")
    most = slots if num_ranks is None else num_ranks
    if min_ranks is not None and not 1 <= min_ranks <= most:
        raise UserError(f"--min-np {min_ranks}: must be from 1 to the number of ranks, {most}")
    least = min_ranks or max(1, most)
    if slots < least:
        raise UserError(f"the hosts have {slots} slots now, but {least} are needed")
    return least


def from_script(script: Path, environment: Mapping[str, str]) -> FindHosts:
    """A function that runs a discovery script, which prints the lines of a host file (as in Horovod's elastic mode).

    Raises `UserError` if there is no such file. The function raises it if the script fails, takes too long or prints a
    malformed line; no output means that there is no host now.
    """
    name = f"--host-discovery-script {script}"
    path = script.absolute()
    if not path.is_file():
        raise UserError(f"{name}: no such file")

    def find() -> list[Host]:
        try:
            code, text, errors = _run(path, environment)
        except subprocess.TimeoutExpired:
            raise UserError(f"{name}: did not end within {_SCRIPT_SECONDS:.0f} seconds") from None
        except OSError as error:
            raise UserError(f"{name}: cannot be run: {error.strerror}") from None
        if code:
            said = errors.strip().splitlines() or ["no message"]
            raise UserError(f"{name}: exit code {code}: {said[-1]}")
        return parse_hostfile(text, name) if text.strip() else []

    return find


def _run(path: Path, environment: Mapping[str, str]) -> tuple[int, str, str]:
    """Exit code, output and error output of a script once it has ended.

    What it has started in the background goes on, but nobody reads its output any more. A script that takes too long is
    killed with what it has started. Raises `subprocess.TimeoutExpired`, and `OSError` if it cannot be started.
    """
    process = subprocess.Popen(
        [path],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    with process:
        assert process.stdout and process.stderr
        said = {process.stdout: b"", process.stderr: b""}
        for stream in said:
            os.set_blocking(stream.fileno(), False)
        deadline, ended = time.monotonic() + _SCRIPT_SECONDS, False
        try:
            while not ended:
                ended = process.poll() is not None
                for stream in said:  # not to their end: a process in the background may keep them open
                    said[stream] += stream.read(_READ_BYTES) or b""
                if not ended and time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired([path], _SCRIPT_SECONDS)
                time.sleep(0.0 if ended else _LOOK_SECONDS)
        except BaseException:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    output, errors = (text.decode(errors="replace") for text in said.values())
    return process.returncode, output, errors
