"""A real Slurm on the hosts of tests/hosts.py: slurmctld on the last one, slurmd on the others, munged on all.

All files lie in the hosts' folder, and munge's socket in each host's own /run: nothing of the machine's own Slurm is
read. There is no accounting, and times are short where Slurm waits for what cannot happen here.
"""

import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hosts import Hosts

_COMMANDS = ("munged", "sbatch", "scancel", "scontrol", "slurmctld", "slurmd", "squeue", "srun")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
_CONFIG = """
ClusterName=test
SlurmctldHost={head}({head_address})
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
AuthType=auth/munge
# How long a requeued job waits before it starts again; 120 by default.
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MpiDefault=none
# Whatever the machine has.
SlurmdParameters=config_overrides
SlurmdTimeout={slurmd_timeout}
InactiveLimit=0
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """The reason why this machine cannot have Slurm, beyond that of `hosts.missing`."""
    for command in _COMMANDS:
        if shutil.which(command, path=_PATH) is None:
            return f"needs the command {command}, of Slurm"
    return None


class SlurmCluster:
    """From construction, when all nodes are idle, to `close`.

    `slurmd_timeout`: seconds after which a node that does not answer is down.
    """

    def __init__(self, hosts: Hosts, cores: int = 2, slurmd_timeout: int = 300) -> None:
        self.hosts, self.head, self.nodes = hosts, hosts.names[-1], hosts.names[:-1]
        self.folder = hosts.folder / "slurm"
        self._servers: list[subprocess.Popen[bytes]] = []
        self._write_files(cores, slurmd_timeout)
        try:
            for host in hosts.names:
                self._start_munged(host)
            self._start(self.head, "slurmctld", "-D", "-i")
            for node in self.nodes:
                self._start(node, "slurmd", "-D", "-N", node)
            self.wait(lambda: self._states() == ["idle"] * len(self.nodes), 30)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "SlurmCluster":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(
        self, *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command of Slurm on the controller's host, where users would log in."""
        environment = {**(os.environ if env is None else env), **self._conf(self.head)}
        return self.hosts.run(self.head, words, cwd=cwd or self.folder, env=environment, timeout=timeout)

    def said(self, *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """What a command of Slurm that succeeds prints."""
        result = self.run(*words, cwd=cwd, env=env)
        assert result.returncode == 0, f"{words}: {result.stdout}{result.stderr}\n{self.logs()}"
        return result.stdout.strip()

    def no_pmix(self) -> str | None:
        """Why `srun --mpi=pmix` does not work here."""
        trial = self.run("srun", "--mpi=pmix", "true")
        return "needs libpmix.so, of libpmix-dev" if "can not load PMIx library" in trial.stderr else None

    def job(self, number: str) -> dict[str, str]:
        """The job as `scontrol show job` tells it, by key."""
        text = self.said("scontrol", "--oneliner", "show", "job", number)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def wait(self, condition: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def left(self, host: str) -> list[str]:
        """The command lines of what runs on a host, except for its servers."""
        servers = re.compile(r"^(\S*/)?(sshd|ssh-agent|munged|slurmctld|slurmd|slurmstepd: \[.*extern)\b|^$")
        return [line for line in self.hosts.processes(host).values() if not servers.match(line)]

    def logs(self) -> str:
        """The last lines of every server."""
        return "\n".join(
            f"--- {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-30:])
            for file in sorted(self.folder.glob("*.log"))
        )

    def close(self) -> None:
        """Ends all servers; jobs that run are cancelled first."""
        self.run("scancel", "--state=RUNNING", "--signal=KILL", "--full", "--user=root")
        for server in reversed(self._servers):
            server.terminate()
        for server in self._servers:
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        self._servers.clear()

    def _write_files(self, cores: int, slurmd_timeout: int) -> None:
        self.folder.mkdir()
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(64))
        nodes = [f"NodeName={name} NodeAddr={self.hosts.address(name)} CPUs={cores}" for name in self.nodes]
        config = _CONFIG.format(
            head=self.head,
            head_address=self.hosts.address(self.head),
            folder=self.folder,
            slurmd_timeout=slurmd_timeout,
            nodes="\n".join(nodes),
        )
        for host in self.hosts.names:
            self._etc(host).mkdir()
            (self._etc(host) / "slurm.conf").write_text(config)
            # No control groups are used, but slurmd looks for them, and these hosts' /sys has none.
            (self._etc(host) / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
            # The hosts share /tmp, where each has folders of the same names.
            (self._etc(host) / "mpi.conf").write_text(f"PMIxCliTmpDirBase={self._etc(host)}\n")
            (self.folder / f"spool-{host}").mkdir()

    def _start_munged(self, host: str) -> None:
        self.hosts.run(host, ["mkdir", "/run/munge"])
        self._start(
            host, "munged", "--foreground", "--force", f"--key-file={self.folder / 'munge.key'}",
            f"--seed-file={self.folder / f'{host}.seed'}", "--num-threads=2",
        )  # fmt: skip
        self.wait(lambda: self.hosts.run(host, ["test", "-S", "/run/munge/munge.socket.2"]).returncode == 0, 10)

    def _start(self, host: str, *words: str) -> None:
        with (self.folder / f"{words[0]}-{host}.out.log").open("wb") as log:
            program = shutil.which(words[0], path=_PATH) or words[0]
            environment = {**os.environ, **self._conf(host)}
            command = [program, *words[1:]]
            self._servers.append(
                self.hosts.popen(
                    host, command, cwd="/", env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )

    def _etc(self, host: str) -> Path:
        return self.folder / f"etc-{host}"

    def _conf(self, host: str) -> dict[str, str]:
        return {"SLURM_CONF": str(self._etc(host) / "slurm.conf")}

    def _states(self) -> list[str]:
        return self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()
