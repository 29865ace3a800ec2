"""Memory that runs out ends a job with one line: what was allocated, and which keys help."""

import re
from pathlib import Path

import pytest
import torch
from commands import Done, command
from small_job import settings, write_texts

from hvd_transformer.comm.world import World
from hvd_transformer.launch.attempt import AttemptResult
from hvd_transformer.launch.restart_policy import Limits, RestartPolicy
from hvd_transformer.models.layers import Block
from hvd_transformer.monitoring.host_usage import HostMemory, host_memory_left
from hvd_transformer.planning.memory_plan import make_plan
from hvd_transformer.planning.plan_text import bytes_text
from hvd_transformer.training import out_of_memory
from hvd_transformer.training.out_of_memory import OutOfMemory, is_out_of_memory
from hvd_transformer.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = ["model.num_layers=2", "model.d_model=32", "model.num_heads=2", "model.d_feedforward=64", "model.max_length=32"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("text"))


@pytest.fixture
def fails_at(monkeypatch: pytest.MonkeyPatch):
    """Lets the n-th forward of a block in training, or the first one in evaluation, find no memory."""

    def fail(number: int | None, message: str = "CUDA out of memory. Tried to allocate 2.00 GiB.") -> None:
        original, calls = Block.forward, 0

        def forward(block, *words, **options):
            nonlocal calls
            calls += block.training and torch.is_grad_enabled()
            if calls == number or (number is None and not block.training):
                raise torch.OutOfMemoryError(message)
            return original(block, *words, **options)

        monkeypatch.setattr(Block, "forward", forward)

    return fail


def train(corpus: Path, run: Path, *words: str) -> Done:
    more = ["data.tokenizer=char", "data.sequence_length=16", "training.device=cpu", "training.max_steps=6"]
    return command(
        "hvd-train", *MODEL, *more, f"data.source={corpus}", f"data.cache_dir={corpus / 'cache'}", f"output_dir={run}",
        *words,
    )  # fmt: skip


def told(done: Done) -> str:
    (line,) = [line for line in done.stderr.splitlines() if "out of memory" in line]
    assert "Traceback" not in done.stderr
    return line


def test_the_line_says_what_was_allocated_beside_the_plan(corpus: Path, tmp_path: Path, fails_at) -> None:
    fails_at(1)
    done = train(corpus, tmp_path / "run")
    assert done.returncode == 2
    line = told(done)
    assert line.startswith("hvd-train: rank 0 on ")
    assert "out of memory in step 1 (layer blocks.0); the host has " in line
    config = settings(*MODEL, "data.sequence_length=16", "training.batch_size=8", "training.device=cpu")
    vocabulary = len(set(corpus.joinpath("train.txt").read_text())) + 1
    plan = make_plan(config, vocabulary)
    (stage,) = plan.stages
    weights, gradients, optimizer, _ = map(bytes_text, plan.memory(stage))
    assert f"weights {weights} + gradients {gradients} + optimizer {optimizer} + activations " in line
    assert re.search(r"activations [\d.]+ [KM]iB, of which the loss with its logits [\d.]+ [KM]iB", line)
    keys = re.findall(r"([a-z_]+\.[a-z_]+)=(\S+) \(-([\d.]+) ([KM])iB[;)]", line)
    saved = [float(number) * {"K": 1, "M": 1024}[unit] for *_, number, unit in keys]
    assert len(keys) == 3 and saved == sorted(saved, reverse=True)
    assert {key for key, *_ in keys} <= {"parallel.recompute", "parallel.micro_batches", "training.batch_size"}
    log = (tmp_path / "run" / "logs" / "rank-000.log").read_text()
    assert line.partition(": ")[2] in log and "torch.OutOfMemoryError" in log and "Traceback" in log


def test_a_stage_of_a_pipeline_and_a_later_step_are_named(corpus: Path, tmp_path: Path, fails_at) -> None:
    fails_at(4)  # the second block of the second step
    done = train(corpus, tmp_path / "run", "parallel.pipeline=2", "parallel.partition=[2, 2]", "training.log_every=1")
    # Memory that was enough once may be so again.
    assert done.returncode == 1
    assert "out of memory in step 2 (stage 1, layer blocks.1, micro-batch 0, forward); " in told(done)


def test_in_an_evaluation_its_batch_size_is_named(corpus: Path, tmp_path: Path, fails_at) -> None:
    fails_at(None)
    line = told(train(corpus, tmp_path / "run", "training.eval_every=2", "training.eval_batch_size=32"))
    assert "in the evaluation after step 2 " in line
    assert "training.eval_batch_size=16 (-" in line and "parallel.recompute" not in line


def test_without_a_plan_the_line_says_what_is_known(
    corpus: Path, tmp_path: Path, fails_at, monkeypatch: pytest.MonkeyPatch
) -> None:
    def estimate_memory(*_, **__):
        raise RuntimeError("a bug of the plan")

    monkeypatch.setattr(out_of_memory, "estimate_memory", estimate_memory)
    fails_at(1)
    done = train(corpus, tmp_path / "run")
    assert done.returncode == 2
    assert told(done).endswith(" at most. A smaller training.batch_size needs less")


def test_a_gpu_is_named_with_what_it_has_and_what_this_process_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 70 << 30)
    words = out_of_memory._device_words(torch.device("cuda", 1), World())
    assert words == "cuda:1 has 80.0 GiB, 1.0 GiB of it free; this process had 70.0 GiB allocated at most"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("x"), MemoryError(), RuntimeError("CUDA error: out of memory")]
)
def test_kinds_of_errors(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_torchs_own_error_of_the_cpu_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 46, dtype=torch.uint8).fill_(0)
    assert is_out_of_memory(caught.value)


def test_the_launcher_tries_again_only_what_has_made_steps() -> None:
    def verdict(*, has_stepped: bool) -> str | None:
        error = OutOfMemory("", has_stepped=has_stepped)
        policy = RestartPolicy(Limits(restarts=9, give_up_seconds=1e9))
        beats = {0: {"step": 5, "loss": 2.0 if has_stepped else None}}
        ended = AttemptResult(error.code, None, {}, False, beats, "")
        for attempt in range(1, 9):
            found = policy.judge(ended, replaceable=lambda host: False)
            if found.give_up is not None:
                return f"{attempt} {found.give_up}"
        return None

    assert verdict(has_stepped=False) == "1 "
    assert verdict(has_stepped=True) == "3 giving up: failed 3 times after step 5"


def test_another_error_is_a_bug_as_before(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def queue(*_, **__):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(Trainer, "queue", queue)
    done = train(corpus, tmp_path / "run")
    assert done.returncode == 1 and "Traceback" in done.stderr and "out of memory" not in done.stderr


def test_memory_of_the_host_and_of_a_container(tmp_path: Path) -> None:
    assert host_memory_left(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  4000 kB\nMemFree:  5 kB\nMemAvailable:  3000 kB\n")
    assert host_memory_left(tmp_path) == HostMemory(4000 << 10, 3000 << 10)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1024\n")
    assert host_memory_left(tmp_path) == HostMemory(4000 << 10, 3000 << 10)
    (group / "memory.max").write_text(f"{2000 << 10}\n")
    assert host_memory_left(tmp_path) == HostMemory(2000 << 10, (2000 << 10) - 1024)
    # Pages of files are given back when memory is needed; those of shared memory are not.
    (group / "memory.current").write_text(f"{1900 << 10}\n")
    (group / "memory.stat").write_text(f"file {800 << 10}\nshmem 4096\ninactive_file {500 << 10}\nactive_file 1024\n")
    assert host_memory_left(tmp_path) == HostMemory(2000 << 10, (600 << 10) + 1024)
    (group / "memory.max").unlink()
    (group / "memory").mkdir()
    (group / "memory/memory.limit_in_bytes").write_text(f"{1000 << 10}\n")
    (group / "memory/memory.usage_in_bytes").write_text(f"{900 << 10}\n")
    (group / "memory/memory.stat").write_text("inactive_file 1\ntotal_inactive_file 2048\ntotal_active_file 1024\n")
    assert host_memory_left(tmp_path) == HostMemory(1000 << 10, (100 << 10) + 3072)


@pytest.mark.parametrize(
    ("line", "top", "limit", "usage"),
    [
        ("0::/slurm/job_7/step_0", "", "memory.max", "memory.current"),
        ("0::/\n9:memory:/slurm/job_7/step_0", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("3:cpu,memory:/slurm/job_7/step_0", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_memory_of_a_job_on_a_host(line: str, top: str, limit: str, usage: str, tmp_path: Path) -> None:
    """Slurm limits the group of the job, around those of its steps; of the group beside it nothing counts."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  4000 kB\nMemFree:  5 kB\nMemAvailable:  3000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
    for name, most in (("slurm/job_7", 800), ("slurm/job_7/step_0", 4000), ("slurm/job_8", 5)):
        group = tmp_path / "sys/fs/cgroup" / top / name
        group.mkdir(parents=True)
        (group / limit).write_text(f"{most << 10}\n")
        (group / usage).write_text(f"{100 << 10}\n")
    assert host_memory_left(tmp_path) == HostMemory(800 << 10, 700 << 10)
    (tmp_path / "proc/self/cgroup").write_text(line.replace("/slurm", "/../slurm") + "\n")  # not below what is mounted
    assert host_memory_left(tmp_path) == HostMemory(4000 << 10, 3000 << 10)
