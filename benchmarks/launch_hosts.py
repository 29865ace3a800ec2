"""What a launch costs the launcher, by the number of hosts: a whole job on simulated hosts of this machine.

A simulated host is a network and a UTS namespace with an address and a name of its own, made by a stand-in for ssh that
runs the command in it. Launcher, node agents and Horovod's rendezvous server are real; a rank is a shell that writes a
heartbeat and sleeps. When all ranks run, one host is killed; the job restarts without it, and its ranks end. Needs
root, as namespaces do.

    python -m benchmarks.launch_hosts              1 to 128 hosts with 8 ranks each
    python -m benchmarks.launch_hosts 64 --slots 2
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click

from benchmarks.machine import machine
from hvd_transformer.config import load
from hvd_transformer.launch.agents import HostAgents
from hvd_transformer.launch.connection.connections import HostConnections
from hvd_transformer.launch.connection.ssh import Ssh
from hvd_transformer.launch.doctor import examine
from hvd_transformer.launch.doctor.findings import Job
from hvd_transformer.launch.horovodrun_command import Horovodrun, launcher_environment
from hvd_transformer.launch.host_pool import HostPool
from hvd_transformer.launch.hostfile import Host
from hvd_transformer.launch.output.launch_output import LaunchOutput
from hvd_transformer.launch.output.launch_screen import Screen
from hvd_transformer.launch.restart_policy import Limits
from hvd_transformer.launch.supervisor import LaunchPlan, Supervisor

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_LAUNCHER = "10.78.255.254"
_LOG = "SIMULATED_HOSTS_LOG"  # one line per ssh: host and process
_HOST = """\
ip -batch - <<END
link add eth0 type bridge
address add $1/16 dev eth0
link set lo up
link set eth0 up
END
hostname "h-$1"
export SSH_CONNECTION="- - $1 -"
exec sh -c "exec $2"
"""
_SSH = f"""\
#!/bin/sh
for last; do host=$word; word=$last; done
echo "$host $$" >>"${_LOG}"
exec unshare --net --uts -- sh "$(dirname "$0")/host" "$host" "$last"
"""
_BEAT = """\
printf '{"rank": %d, "host": "%s", "time": 1e12, "step": 1, "phase": "step"}' \\
    $HOROVOD_RANK $HOROVOD_HOSTNAME >"$HVD_TRANSFORMER_FOLDER/beat-$HOROVOD_RANK"
"""
_SLEEP, _END = f"{_BEAT} exec sleep 10000", f"{_BEAT} exit 0"


def hosts(number: int, slots: int = 8, run_seconds: float = 10.0) -> dict[str, float]:
    """Costs of the launcher of a job on so many hosts: CPU and wall seconds, connections, messages, bytes of memory.

    All ranks run for `run_seconds` before a host is killed.
    """
    with tempfile.TemporaryDirectory(prefix="launch-hosts-") as name:
        folder = Path(name)
        (folder / "host").write_text(_HOST)
        (folder / "ssh").write_text(_SSH)
        (folder / "ssh").chmod(0o755)
        environment = {
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}:/usr/sbin:/sbin",
            _LOG: str(folder / "log"),
        }
        drive = f"{sys.executable} -c 'import benchmarks.launch_hosts as b; b.drive({number}, {slots}, {run_seconds})'"
        words = ["unshare", "--net", "--uts", "--", "sh", str(folder / "host"), _LAUNCHER, drive]
        done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, timeout=900)
        assert done.returncode == 0, done.stdout
        return dict(json.loads(done.stdout.splitlines()[-1]))


@dataclass
class _Watch(LaunchOutput):
    """Sees how far the job is: kills the last host when all ranks run."""

    ranks: int
    run_seconds: float
    kill: Callable[[], None]
    mark: Callable[[str], None]
    starts: int = 0
    _run_since: float | None = field(default=None)

    def __post_init__(self) -> None:
        super().__init__(Screen(), None)

    def start(self, hosts: Sequence[Host], restart: int) -> None:
        super().start(hosts, restart)
        self.starts += 1

    def look(self, agents: HostAgents) -> None:
        super().look(agents)
        if self._run_since is None and agents.running == self.ranks:
            self.mark("start")
            self._run_since = time.monotonic()
        if self.starts == 1 and self._run_since and time.monotonic() - self._run_since > self.run_seconds:
            self._run_since = math.inf
            self.mark("running")
            self.kill()


def drive(number: int, slots: int, run_seconds: float) -> None:
    """The launcher's process: prints the costs."""
    examine._HOSTS = 4  # all of them share this machine's cores, and answer as slowly
    log, messages = Path(os.environ[_LOG]), 0
    names = [f"10.78.{at // 200}.{at % 200 + 1}" for at in range(number)]
    listed = [Host(name, slots) for name in names]
    environment = {**launcher_environment(os.environ, []), _LOG: str(log)}
    job = Job.of(Horovodrun(listed), load(overrides=["training.device=cpu", f"output_dir={log.parent}"]))
    costs: dict[str, float] = {}
    took = HostAgents.took

    def counting(agents: HostAgents, connection: Any, message: Any) -> None:
        nonlocal messages
        messages += 1
        took(agents, connection, message)

    def connections() -> int:
        return len(log.read_text().splitlines()) if log.exists() else 0

    before = [time.process_time(), time.monotonic(), 0.0, 0.0]

    def mark(phase: str) -> None:
        now = [time.process_time(), time.monotonic(), messages, connections()]
        for at, unit in enumerate(("CPU s", "s", "messages", "ssh")):
            costs[f"{phase}: {unit}"] = now[at] - before[at]
        before[:] = now

    def kill() -> None:
        host, pid = log.read_text().splitlines()[-1].split()
        os.kill(int(pid), signal.SIGKILL)

    with patch.object(HostAgents, "took", counting):
        examine.examine(job, Ssh(), environment)
        mark("doctor")
        with closing(HostConnections(Ssh(), environment)) as pool:
            assert not examine.Admission(job, pool, environment).refused(listed)
            mark("preflight")
            spare = [] if number > 1 else [Host("localhost", slots)]
            plan = LaunchPlan(["sh", "-c", _SLEEP], ["sh", "-c", _END], {}, environment, Limits(1, 600.0), min_ranks=1)
            watch = _Watch(slots * number, run_seconds, kill, mark)
            found = HostPool(lambda: [*listed, *spare], slots * number)
            code = Supervisor(plan, Horovodrun(listed), found, pool, watch).run()
            mark("restart")
        mark("end")
    costs["exit code"], costs["starts"] = code, watch.starts
    # Not getrusage's, which begins with that of the parent.
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    costs["memory"] = 1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])
    print(json.dumps(costs))


@click.command()
@click.argument("numbers", nargs=-1, type=click.IntRange(min=1), metavar="[HOSTS]...")
@click.option("--slots", default=8, show_default=True, type=click.IntRange(min=1), help="Ranks per host.")
def main(numbers: tuple[int, ...], slots: int) -> None:
    """Print the launcher's costs on so many hosts (default: 1 to 128)."""
    row = "{:>6} | {:>7} | {:>10} | {:>9} | {:>7} | {:>11} | {:>9} | {:>5} | {:>7} | {:>6}"
    print(row.format(*_COLUMNS))
    for number in numbers or SIZES:
        costs = hosts(number, slots)
        ssh = sum(costs[f"{phase}: ssh"] for phase in ("preflight", "start", "running", "restart"))
        print(
            row.format(
                number,
                f"{costs['doctor: CPU s']:.2f}",
                f"{costs['preflight: CPU s']:.2f}",
                f"{costs['start: CPU s']:.2f}",
                f"{costs['start: s'] + costs['preflight: s']:.1f}",
                f"{costs['running: CPU s']:.2f}",
                f"{costs['running: messages'] / costs['running: s']:.0f}",
                f"{ssh:.0f}",
                f"{costs['restart: s']:.1f}",
                f"{costs['memory'] / 2**20:.0f}",
            ),
            flush=True,
        )
    print(machine())


_COLUMNS = ("hosts", "doctor", "preflight", "start CPU", "start s", "10 s CPU", "messages/s", "ssh", "restart", "MiB")

if __name__ == "__main__":
    main()
