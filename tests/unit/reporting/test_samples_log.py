"""samples.jsonl has one whole line per evaluation, each step once, whatever happened."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_transformer.reporting.samples_log import SamplesLog


def fail(message: str) -> None:
    pytest.fail(message)


def rows(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "samples.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


def test_a_line_per_evaluation_as_it_was_given(tmp_path: Path) -> None:
    log = SamplesLog(tmp_path, 0, fail)
    assert list(tmp_path.iterdir()) == []  # a run without samples has no file
    first = [{"prompt": 'a "quote"\n\u2028', "continuation": "Grüße 中文\0"}, {"prompt": "", "continuation": ""}]
    log.write(10, first)
    assert rows(tmp_path) == [{"step": 10, "samples": first}]  # readable while the run is in progress
    log.write(20, [{"source": "a"}])
    log.close()
    assert rows(tmp_path)[1] == {"step": 20, "samples": [{"source": "a"}]}


def test_long_texts_are_truncated_and_half_characters_replaced(tmp_path: Path) -> None:
    log = SamplesLog(tmp_path, 0, fail)
    log.write(1, [{"whole": "a" * 1000, "long": "b" * 1001, "half": "\ud800!"}])
    (sample,) = rows(tmp_path)[0]["samples"]
    assert sample == {"whole": "a" * 1000, "long": "b" * 999 + "…", "half": "?!"}


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    log = SamplesLog(tmp_path, 0, fail)
    for step in (10, 20, 30):
        log.write(step, [{"text": f"first {step}"}])
    log.close()
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 40, "sam')
    log = SamplesLog(tmp_path, 20, fail)
    assert [row["step"] for row in rows(tmp_path)] == [10, 20]
    log.write(30, [{"text": "again 30"}])
    assert [row["samples"][0]["text"] for row in rows(tmp_path)] == ["first 10", "first 20", "again 30"]
    # Those of an evaluation that is repeated are written again.
    SamplesLog(tmp_path, 30, fail, evaluates=True).write(30, [{"text": "once more"}])
    assert [row["samples"][0]["text"] for row in rows(tmp_path)] == ["first 10", "first 20", "once more"]


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from hvd_transformer.reporting.samples_log import SamplesLog

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is then an OSError, half of it done
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
log = SamplesLog(Path(sys.argv[1]), 0, print)
for step in range(1, 9):
    if step == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    log.write(step, [{"text": "x" * 200}])
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.close()
"""


def test_a_full_disk_is_told_once_and_loses_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True, check=True)
    (warning,) = done.stdout.splitlines()
    assert warning.startswith(f"{tmp_path / 'samples.jsonl'}: cannot write: File too large. Training continues")
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 9))
