"""The costs of one rank by the number of ranks, over gloo on this machine: CPU-seconds, collectives, bytes.

Two cores cannot show the time of eight ranks. Each rank counts what it uses itself, for the start of the job, some
steps, a checkpoint and an evaluation; the rank that uses most counts. Writes are those to sockets and files.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from benchmarks.growth.fit import Point
from benchmarks.growth.model import SETTINGS
from hvd_transformer.comm.group import Group
from hvd_transformer.comm.world import World
from hvd_transformer.config import load
from hvd_transformer.training import train_job
from hvd_transformer.training.process import StopRequest
from hvd_transformer.training.session import Session

_STEPS = 100
_PHASES = ("start", f"{_STEPS} steps", "checkpoint", "evaluation")
_COUNTS = ("CPU", "collectives", "bytes", "writes", "bytes written")


def ranks(number: int) -> dict[str, Point]:
    """Of the rank that uses most, of so many."""
    with tempfile.TemporaryDirectory(prefix="growth-") as name:
        folder = Path(name)
        (folder / "text.txt").write_text("the cat sat on my big red rug .\n" * 2000)
        launcher = [str(Path(sys.executable).with_name("horovodrun")), "-np", str(number), "-H", f"localhost:{number}"]
        words = [*launcher, "--gloo", sys.executable, "-m", "benchmarks.growth.ranks", str(folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=600)
        used = [json.loads(file.read_text()) for file in folder.glob("rank-*.json")]
        assert len(used) == number
        found = {
            f"{phase}: {count}": max(rank[phase][index] for rank in used)
            for phase in _PHASES
            for index, count in enumerate(_COUNTS)
            if number > 1 or index == 0
        }
        (checkpoint,) = (folder / "run" / "checkpoints").glob("step-*")
        files = list(checkpoint.iterdir())
        found["checkpoint's folder: files"] = len(files)
        found["checkpoint's folder: bytes"] = sum(file.stat().st_size for file in files)
        return {name: Point(number, [value]) for name, value in found.items()}


class _Counted:
    """A group's collectives, counted: how many, and the bytes that go in and come out."""

    def __init__(self) -> None:
        self.collectives = self.bytes = 0

    def __enter__(self) -> "_Counted":
        self._before = {name: getattr(Group, name) for name in _COLLECTIVES}
        for name, method in self._before.items():
            setattr(Group, name, self._counting(method))
        return self

    def __exit__(self, *_: object) -> None:
        for name, method in self._before.items():
            setattr(Group, name, method)

    def used(self) -> list[float]:
        """So far."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return [usage.ru_utime + usage.ru_stime, self.collectives, self.bytes, int(io["syscw"]), int(io["wchar"])]

    def _counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counting(group: Group, tensor: Tensor, *arguments: Any, **more: Any) -> Any:
            result = method(group, tensor, *arguments, **more)
            if group.size == 1:
                return result
            self.collectives += 1
            self.bytes += tensor.nbytes
            if not callable(result):
                return result

            def wait() -> Any:
                found = result()
                self.bytes += (found if isinstance(found, Tensor) else found[0]).nbytes
                return found

            return wait

        return counting


# What Horovod is called for; the others are made of these.
_COLLECTIVES = ("all_reduce_async_", "reduce_scatter_async", "all_gather_async", "all_to_all_async", "broadcast_")


def main(folder: Path) -> None:
    """One rank."""
    config = load(
        overrides=[
            *SETTINGS, f"data.source={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}",
            f"output_dir={folder / 'run'}",
        ]
    )  # fmt: skip
    with _Counted() as counted:
        marks = [counted.used()]
        world = World.start(config.training.stall_seconds)

        class Measured(Session):
            def train(self, stop: StopRequest) -> str:
                for _ in _phases(self):
                    marks.append(counted.used())
                return "stopped"

        with patch.object(train_job, "Session", Measured), redirect_stdout(StringIO()):
            train_job.run(config, world, StopRequest())
        phases = zip(marks, marks[1:], strict=False)
        used = {
            name: [end - begin for begin, end in zip(*ends, strict=True)]
            for name, ends in zip(_PHASES, phases, strict=True)
        }
        (folder / f"rank-{world.rank}.json").write_text(json.dumps(used))
        world.close()


def _phases(session: Session) -> Iterator[None]:
    """Does one after the other."""
    plans = session.trainer.steps()
    session.trainer.step(next(plans))
    yield
    for _ in range(_STEPS):
        session.trainer.step(next(plans))
    yield
    session.save(best=False)
    session.saver.wait()
    yield
    session.trainer.evaluate("valid")
    yield


if __name__ == "__main__":
    main(Path(sys.argv[1]))
