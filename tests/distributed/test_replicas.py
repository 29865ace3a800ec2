"""Ranks that go apart, die or disagree: every job ends soon, with a message that says which rank and why."""

import re
import subprocess
import time

import pytest
from conftest import rank_environment
from jobs import FAULTY, TRAIN, lines, started, state, tiny, write_corpus

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", train=12000)


@pytest.fixture
def settings(corpus, tmp_path):
    run = tmp_path / "run"
    return [
        *tiny(corpus),
        f"output_dir={run}",
        "communication.bucket_mb=0.001",
        "checkpoint.every_steps=5",
        "training.max_steps=40",
    ]


def test_a_corrupted_replica_is_named(ranks, settings, tmp_path):
    result = ranks(3, [*FAULTY, 1, 12, "corrupt", *settings], backend="mpirun", timeout=90)
    assert result.returncode == 1
    message = "hvd-train: step 15: the weights of rank 1 differ from those of the other ranks"
    assert result.stderr.count(message) == 1
    assert "Traceback" not in result.stderr
    # Nothing of the two weights was saved after they went apart.
    assert state(tmp_path / "run")["position"]["step"] == 10


OTHERS = "rank 1 differ from those of the other ranks"
MODES = {
    "state": (3, ["parallel.optimizer_shard=state"], OTHERS),
    "gradients": (3, ["parallel.optimizer_shard=gradients", "parallel.micro_batches=2"], OTHERS),
    # The weight is in a share that only two ranks have.
    "shared matrices": (4, ["parallel.tensor=2", "parallel.vocab_parallel=true"], "rank 1, 3 differ from each other"),
    "both": (4, ["parallel.tensor=2", "parallel.optimizer_shard=gradients"], OTHERS),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_steps", [35, pytest.param(200, marks=pytest.mark.slow)])
def test_replicas_stay_the_same_and_one_that_is_not_is_named(world, settings, tmp_path, mode, num_steps):
    """It is changed after an update, where a checkpoint is due: the next update would bring what other ranks hold."""
    size, words, named = MODES[mode]
    words = [*settings, *words, f"training.max_steps={num_steps + 10}", "training.epochs=99"]
    ended = world(size).call("faulty:train", 1, num_steps + 5, "corrupt", words)
    assert [code for code, _, _ in ended] == [1] * size
    message = f"hvd-train: step {num_steps + 5}: the weights of {named}\n"
    assert [err for _, _, err in ended] == [message] + [""] * (size - 1)
    assert state(tmp_path / "run")["position"]["step"] == num_steps


@pytest.mark.parametrize(("backend", "fault"), [("gloo", "raise"), ("mpirun", "die")])
def test_a_rank_that_fails_in_mid_step_ends_the_others(settings, tmp_path, backend, fault):
    with started(3, [*FAULTY, 1, 20, fault, *settings], backend, tmp_path / "output") as job:
        deadline = time.monotonic() + 90
        while not (metrics := tmp_path / "run/metrics.jsonl").exists() or metrics.read_bytes().count(b"\n") < 19:
            assert time.monotonic() < deadline and job.popen.poll() is None, job.text()
            time.sleep(0.02)
        began = time.monotonic()
        code = job.wait(60)
        job.wait_gone(20)
        seconds = time.monotonic() - began
    text = job.text()
    print(f"{backend}, {fault}: all gone {seconds:.1f} s after step 19, code {code}\n{text}")
    assert code != 0
    assert seconds < 30  # not by the watchdog, which waits for minutes
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(1, 20))
    if fault == "raise":
        assert "hvd-train: rank 1 failed:" in text
        assert "RuntimeError: this rank has a fault" in text
        assert "RuntimeError: this rank has a fault" in (tmp_path / "run/logs/rank-001.log").read_text()
    elif backend == "gloo":
        assert re.search(r"hvd-train: rank [02] on \S+ lost another rank", text)
    else:
        assert "signal 9" in text


def test_ranks_with_different_settings_say_which(world, settings):
    result = world(2).commands(*(["hvd-train", *settings, f"optimizer.lr={lr}"] for lr in (0.5, 0.25)))
    assert result.returncode == 2
    said = "hvd-train: optimizer.lr: rank 1 has 0.25, rank 0 has 0.5; every rank needs the same configuration\n"
    assert result.stderr == said


def test_ranks_that_share_otherwise_say_so(settings, tmp_path):
    """Horovod finds it, before the ranks can compare their settings."""
    words = ["mpirun", "--oversubscribe", "-np", "2", TRAIN, *settings, "parallel.tensor=2"]
    words += [":", "-np", "2", TRAIN, *settings]
    result = subprocess.run(words, env=rank_environment(), capture_output=True, text=True, timeout=90)
    assert result.returncode == 2
    (said,) = re.findall("hvd-train: .*", result.stderr)  # Horovod's own lines may lack their end when it comes
    assert said.endswith("Every rank needs the same parallel.tensor")
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


KEY = "training.max_step (command line): unknown key, did you mean training.max_steps?"
SOURCE = "data.source=absent: no such file or folder, and no known name"


def test_wrong_input_that_the_ranks_find_is_said_once(world, settings, tmp_path):
    result = world(2).command("hvd-train", *settings, "data.source=absent")
    assert result.returncode == 2
    assert result.stderr.count("hvd-train: ") == result.stderr.count(f"hvd-train: {SOURCE}") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("gloo", []),
        ("mpirun", ["parallel.tensor=2"]),  # the ranks share matrices, so they are in groups before they can say it
        pytest.param("mpirun", [], marks=pytest.mark.slow),
    ],
)
def test_a_wrong_key_is_said_once_by_each_launcher(ranks, settings, tmp_path, backend, words):
    result = ranks(2, [TRAIN, *settings, *words, "training.max_step=5"], backend=backend, timeout=90)
    assert result.stderr.count("hvd-train: ") == 1
    assert result.stderr.count(f"hvd-train: {KEY}") == 1
    if backend == "mpirun":
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
    else:  # horovodrun's own code is always 1; the worker's is in its text, after a traceback of its own
        assert not re.search(r"^\[\d\].*Traceback", result.stderr, re.MULTILINE)
        assert result.returncode == 1
        assert "Exit code: 2\n" in result.stderr
    assert not (tmp_path / "run").exists()
