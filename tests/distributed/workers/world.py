"""One rank of a world that runs many cases, one after the other: world.py PORT.

It connects to the tests' process, says its rank, and answers each line (a case, in JSON) with one (what came of it).
The commands of a case run as ever, but find the world that is there already.
"""

import gc
import importlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from commands import captured, command  # noqa: E402

from hvd_transformer.comm.horovod_env import launched  # noqa: E402
from hvd_transformer.comm.world import World  # noqa: E402
from hvd_transformer.parallel.mesh import process_groups  # noqa: E402
from hvd_transformer.reporting import run_report  # noqa: E402


def groups(size: int) -> list[tuple[int, ...]]:
    """Of every parallel.tensor."""
    return sorted({tuple(group) for tensor in range(1, size) for group in process_groups(size, tensor)})


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Exit code, what was printed, and what a function returned."""
    if case["kind"] == "command":
        done = command(*case["words"], folder=case["folder"], environment=case["environment"])
        return {"code": done.returncode, "out": done.stdout, "err": done.stderr, "result": None}
    module, _, name = case["words"][0].partition(":")
    function, arguments = getattr(importlib.import_module(module), name), case["words"][1:]
    code, out, err, result = captured(lambda: function(*arguments), case["folder"], environment=case["environment"])
    return {"code": code, "out": out, "err": err, "result": result}


def main() -> None:
    run_report.write_report = lambda run: run  # its charts take longer than these runs; test_run_directory.py has them
    world, close = World.start(groups=groups(launched().size)), World.close
    with (
        socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection,
        connection.makefile("rw", encoding="utf-8") as lines,
        patch.object(World, "start", lambda *words, **more: world),
        patch.object(World, "close", World.barrier),
    ):
        lines.write(json.dumps({"rank": world.rank, "pid": os.getpid()}) + "\n")
        lines.flush()
        gc.collect()
        gc.freeze()  # a case ends with a full collection, which need not visit all of torch
        for line in lines:
            lines.write(json.dumps(answer(json.loads(line))) + "\n")
            lines.flush()
    close(world)


if __name__ == "__main__":
    main()
