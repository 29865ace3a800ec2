"""`launch --detach`, `attach` and `stop`: real commands and real ranks."""

import json
import subprocess
import time
from pathlib import Path

import pytest
from conftest import BIN, rank_environment
from jobs import steps, summary, tiny, write_corpus

pytestmark = pytest.mark.distributed

PROGRAM = BIN / "hvd-transformer"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", train=20_000)


def run(*words: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *map(str, words)], capture_output=True, text=True, env=rank_environment(), timeout=timeout
    )


def detach(corpus: Path, folder: Path, num_steps: int) -> subprocess.CompletedProcess[str]:
    settings = [*tiny(corpus), f"output_dir={folder}", f"training.max_steps={num_steps}", "training.epochs=100000"]
    return run("launch", "--detach", "-np", 2, "--gloo", "--", *settings, "training.eval_every=100000")


def test_a_job_is_left_seen_and_stopped_and_goes_on(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    left = detach(corpus, folder, 100_000)
    assert left.returncode == 0, left.stderr
    assert f"hvd-transformer attach {folder}" in left.stdout
    second = run("launch", "-np", 1, "--", *tiny(corpus), f"output_dir={folder}")
    assert second.returncode == 2
    assert "in use by a launcher on host" in second.stderr

    seeing = subprocess.Popen([PROGRAM, "attach", folder], stdout=subprocess.PIPE, text=True, env=rank_environment())
    assert seeing.stdout
    assert any("step" in seeing.stdout.readline() for _ in range(100))
    stopped = run("stop", folder)
    assert stopped.returncode == 0, stopped.stderr
    seeing.stdout.read()
    assert seeing.wait(60) == 1
    seeing.stdout.close()
    ended = json.loads((folder / "exit.json").read_text())
    assert (ended["code"], ended["cause"], ended["restarts"]) == (1, "it was asked to stop", 0)
    done = summary(folder)
    assert done["status"] == "stopped"

    again = detach(corpus, folder, done["steps"] + 5)
    assert again.returncode == 0, again.stderr
    deadline = time.monotonic() + 60
    while not (folder / "exit.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert json.loads((folder / "exit.json").read_text())["code"] == 0
    assert [step for step, _ in steps(folder, "loss")] == list(range(1, done["steps"] + 6))


def test_what_is_wrong_at_the_start_is_seen_at_once(corpus: Path, tmp_path: Path) -> None:
    words = ["launch", "--detach", "-np", 1, "-H", "no.such.host.invalid:1", "--", *tiny(corpus)]
    refused = run(*words, f"output_dir={tmp_path / 'run'}")
    assert refused.returncode == 2
    assert "host no.such.host.invalid: cannot be reached by ssh: unknown host name" in refused.stderr
    assert not (tmp_path / "run").exists()
