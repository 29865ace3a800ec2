"""A command in a process group of its own: seconds, the most memory of all its processes together, killed on demand."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from click import ClickException

from benchmarks.processes import ProcessTree

_PAUSE = 0.25


class Watched(NamedTuple):
    """`memory` in bytes; `output` is what it printed."""

    seconds: float
    memory: int
    output: str

    def figures(self, tokens: int) -> dict[str, float]:
        """Of a run that wrote so many tokens."""
        return {"seconds": self.seconds, "tokens_per_second": tokens / self.seconds, "megabytes": self.memory / 1e6}


def watch(
    command: Sequence[str], environment: Mapping[str, str], kill_when: Callable[[], bool] | None = None
) -> Watched:
    """Runs it to its end, or until `kill_when` says so: then all its processes get SIGKILL. Raises `ClickException`
    where it fails, or ends before it was killed."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        began, most, killed, tree = time.monotonic(), 0, False, ProcessTree()
        child = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            tree.add(child.pid)
            while child.poll() is None and not killed:
                most = max(most, tree.memory())
                killed = kill_when is not None and kill_when()
                if not killed:
                    time.sleep(_PAUSE)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        seconds = time.monotonic() - began
        output.seek(0)
        found = Watched(seconds, most, output.read())
    if not killed and child.returncode:
        raise ClickException(f"{' '.join(command)}: exit code {child.returncode}\n{found.output[-2000:]}")
    if not killed and kill_when is not None:
        raise ClickException(f"{' '.join(command)}: ended before it was killed; give it more documents")
    return found
