"""The control groups that limit this process: of a container, a job of Slurm, or a unit of systemd. Linux only."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Folders of this process's group and those around it, all of which limit it, each with its version: 1 or 2.

    `controller` is one of version 1, such as "memory"; version 2 has one hierarchy for all. In a container the group is
    the outermost one that is visible. The folders may be missing, and the same one may come twice: version 1 may mount
    controllers together as "cpu,cpuacct", in any order, with or without a link "cpu" to it.
    """
    path = {"": "/", controller: "/"}
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, own = line.split(":", 2)
            path |= dict.fromkeys(controllers.split(","), own)
    mount = root / "sys/fs/cgroup"
    joint = sorted(top for top in mount.glob(f"*{controller}*") if controller in top.name.split(","))
    for top, own, version in ((mount, path[""], 2), *((top, path[controller], 1) for top in joint)):
        parts = [part for part in own.split("/") if part]
        inside = [] if ".." in parts else parts  # not below what is mounted here
        for depth in range(len(inside) + 1):
            yield top.joinpath(*inside[:depth]), version
