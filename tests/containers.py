"""Containers without an engine: pods of an MPIJob on the hosts of `hosts.py`, with the files that the image has.

A container has a root folder of its own, made for each start: the machine's /usr, this Python and the checkout, and
from docker/ what Dockerfile.cpu copies. It has its own processes too, and its entry point runs as the pod's user,
without capabilities and with no way to new privileges. The image's tini in front of the entry point is left out.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from conftest import REPOSITORY
from hosts import Hosts

from hvd_transformer.launch.scheduler.scheduled_job import FOLDER, GROUP_ID, LAUNCHER_KEY, USER_ID

_HOME = "/home/trainer"
_VENV = "/opt/venv"
_DOCKER = REPOSITORY / "docker"
_NO_PRIVILEGES = ("--clear-groups", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all", "--no-new-privs")


class Container:
    """A container that runs: `process` ends with its exit code."""

    def __init__(self, process: "subprocess.Popen[bytes]", output: Path) -> None:
        self.process, self._output = process, output

    @property
    def pid(self) -> int:
        """The entry point's, once it has begun."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def signal(self, number: signal.Signals) -> None:
        """To the entry point alone, as an engine does."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to everything in the container."""
        with suppress(FileNotFoundError, IndexError, ProcessLookupError):  # it has ended
            self.signal(signal.SIGKILL)
        self.process.kill()
        self.process.wait(20)

    def text(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait(self, seconds: float) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.text()}") from None


class Pods:
    """What the pods of an MPIJob share: the operator's keys and hostfile, and volumes by their mount points."""

    def __init__(self, hosts: Hosts, folder: Path, workers: Mapping[str, int], volumes: Mapping[str, Path]) -> None:
        """`workers`: slots by host."""
        self._hosts, self._folder = hosts, folder
        self._volumes = {**volumes, LAUNCHER_KEY: folder / "secret"}
        write_secret(folder / "secret")
        (folder / "hostfile").write_text("".join(f"{host} slots={slots}\n" for host, slots in workers.items()))
        for path in volumes.values():
            for place in (path, *path.rglob("*")):
                os.chown(place, USER_ID, GROUP_ID)

    def start(self, host: str, spec: Mapping[str, Any]) -> Container:
        """Starts the pod `spec` on a host."""
        (container,) = spec["containers"]
        place = self._folder / f"{host}-{len(list(self._folder.iterdir()))}"
        root = place / "root"
        root.mkdir(parents=True)
        security = spec["securityContext"]
        group = security.get("runAsGroup", GROUP_ID)
        words = ["setpriv", f"--reuid={security['runAsUser']}", f"--regid={group}", *_NO_PRIVILEGES]
        words += ["env", "-i", "-C", container["workingDir"], f"HOME={_HOME}", "OMP_NUM_THREADS=1"]
        words += [f"PATH={_VENV}/bin:/usr/local/bin:/usr/bin:/bin", f"PYTHONPATH={REPOSITORY}"]
        args = [word.replace("$$", "$") for word in container["args"]]
        words += ["bash", str(_DOCKER / "entrypoint.sh"), *args]
        script = [*self._root(root), f"exec chroot {quote(str(root))} {' '.join(map(quote, words))}"]
        unshare = ["unshare", "--mount", "--pid", "--fork", "sh", "-ec", "\n".join(script)]
        output = place / "output"
        with output.open("wb") as file:
            process = self._hosts.popen(host, unshare, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd="/")
        return Container(process, output)

    def _root(self, root: Path) -> list[str]:
        """Shell commands that make a root folder: $R."""
        lines = [f"R={quote(str(root))}", "mount -t tmpfs -o mode=755 none $R", "mkdir $R/usr"]
        lines += ["mount --rbind /usr $R/usr", "mkdir $R/dev $R/proc $R/sys $R/run $R/etc $R/opt"]
        lines += ["for name in bin sbin lib lib32 lib64; do [ ! -L /$name ] || cp -a /$name $R/; done"]
        lines += ["mount --rbind /dev $R/dev", "mount -t tmpfs none $R/dev/shm", "mount -t proc none $R/proc"]
        lines += ["mount --bind /sys $R/sys", "mkdir -m 1777 $R/tmp"]
        lines += ["cp -a /etc/ld.so.cache /etc/alternatives $R/etc/"]
        lines += [f"install -d -o {USER_ID} -g {GROUP_ID} $R{FOLDER} $R/keys/workers"]
        lines += [f"install -d -o {USER_ID} -g {GROUP_ID} $R{_HOME}"]
        lines += [f"install -d -o {USER_ID} -g {GROUP_ID} -m 700 $R{_HOME}/.ssh"]
        needed = {Path(name).resolve() for name in (REPOSITORY, sys.prefix, sys.base_prefix)}
        for path in sorted(needed):
            if not path.is_relative_to("/usr"):
                lines += [f"mkdir -p $R{quote(str(path))}", f"mount --bind {quote(str(path))} $R{quote(str(path))}"]
        lines += [f"ln -s {quote(sys.prefix)} $R{_VENV}"]
        # As Dockerfile.cpu copies them.
        lines += ["mkdir $R/etc/ssh $R/etc/ssh/ssh_config.d $R/etc/mpi"]
        lines += ["echo 'Include /etc/ssh/ssh_config.d/*.conf' >$R/etc/ssh/ssh_config"]
        lines += [f"cp {quote(str(_DOCKER / 'ssh_config'))} $R/etc/ssh/ssh_config.d/hvd-transformer.conf"]
        lines += [f"cp {quote(str(_DOCKER / 'sshd_config'))} $R/etc/ssh/hvd-transformer_sshd_config"]
        lines += [f"cp {quote(str(self._folder / 'hostfile'))} $R/etc/mpi/hostfile", "cp /etc/hosts $R/etc/"]
        lines += [f"echo 'trainer:*:{USER_ID}:{GROUP_ID}::{_HOME}:/bin/bash' >$R/etc/passwd"]
        lines += [f"echo 'trainer:x:{GROUP_ID}:' >$R/etc/group", "echo 'passwd: files' >$R/etc/nsswitch.conf"]
        lines += ["echo 'hosts: files' >>$R/etc/nsswitch.conf"]
        for mount, path in self._volumes.items():
            lines += [f"mkdir -p $R{mount}", f"mount --bind {quote(str(path))} $R{mount}"]
        return lines


def write_secret(folder: Path) -> None:
    """The Secret that the operator makes for an MPIJob, as the kubelet mounts it for a pod's fsGroup."""
    folder.mkdir()
    command = ["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-C", "", "-f", folder / "id_rsa"]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    shutil.copy(folder / "id_rsa.pub", folder / "authorized_keys")
    for file in folder.iterdir():
        os.chown(file, 0, GROUP_ID)
        file.chmod(0o640)
