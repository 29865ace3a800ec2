"""Makes run directories as `hvd-train` leaves them, without training."""

import json
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hvd_transformer.config import dump, load


def make_run(folder: Path, rows: Iterable[Mapping[str, Any]] = (), *words: str, **summary: Any) -> Path:
    """A run directory with these lines and, if there is any, this summary."""
    (folder / "logs").mkdir(parents=True)
    config = load(preset="tiny", overrides=[f"output_dir={folder}", *words])
    (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
    (folder / "metrics.jsonl").write_bytes(b"".join(map(line, rows)))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def add_lines(run: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"".join(map(line, rows)))


def training(steps: Iterable[int], **more: Any) -> list[dict[str, Any]]:
    """Lines as of a language model that takes 8 samples and 100 ms per step."""
    return [
        {
            "step": step,
            "epoch": 1,
            "samples": 8 * step,
            "loss": 10 / max(step, 1),
            "lr": 0.001,
            "tokens_per_second": 5000.0,
            "milliseconds_per_step": 100.0,
            **more,
        }
        for step in steps
    ]


def foreign_lock(path: Path, renewals: int = 1) -> None:
    """A lock that a process on another host holds."""
    owner = {"what": "hvd-train", "host": "elsewhere", "pid": 1, "since": "then", "token": "a1", "started": "1"}
    more = {"processes": "another kernel", "start": None, "renewals": f"{renewals:012}"}
    path.write_text(json.dumps({**owner, **more}), encoding="utf-8")


def left_over_lock(path: Path) -> None:
    """A lock of this host whose process has ended."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    owner = {"what": "hvd-train", "host": socket.gethostname(), "pid": os.getpid(), "since": "then", "token": "b2"}
    more = {"processes": f"{boot} {Path('/proc/self/ns/pid').readlink()}", "started": "0", "start": None}
    path.write_text(json.dumps({**owner, **more}), encoding="utf-8")
