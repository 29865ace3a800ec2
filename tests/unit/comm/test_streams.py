"""No stream uses another one's memory too early or too late, and each line that sees to it is needed."""

import gc
import linecache
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_job import run, settings, trainer
from stream_checker import CPU, Clock, FakeStream, StreamChecker, StreamedHorovod
from torch import Tensor, nn

from hvd_transformer.comm.streams import leave_default_stream, start_copy
from hvd_transformer.comm.world import World
from hvd_transformer.gradients import sync
from hvd_transformer.gradients.buffers import WHOLE, ZeroShard
from hvd_transformer.gradients.transfer_sizes import transfer_sizes
from hvd_transformer.nn.contracts import Layer, MicroBatch
from hvd_transformer.parallel import engine, pipeline
from hvd_transformer.parallel.pipeline import Pipeline, Stage
from hvd_transformer.parallel.stage_link import CudaStageStreams, StageStreams
from hvd_transformer.parallel.tensor_parallel import RankTensorGroup
from hvd_transformer.training.training_step import TrainingStep

Patch = pytest.MonkeyPatch
Scenario = Callable[[StreamChecker, Patch], object]


@pytest.fixture
def checker(monkeypatch: Patch) -> Iterator[StreamChecker]:
    found = StreamChecker()
    found.install(monkeypatch)
    # All that `Link.guard` needs of Horovod, which may not be installed.
    exceptions = SimpleNamespace(HorovodInternalError=ConnectionError)
    monkeypatch.setitem(sys.modules, "horovod.common.exceptions", exceptions)
    with found.watching():
        yield found


def give_streams(monkeypatch: Patch, *, one_gpu: bool) -> None:
    """Stages on a CPU get the streams of stages on GPUs: all on one, or each on its own."""

    def make_streams(devices: list[torch.device]) -> list[StageStreams]:
        if len(devices) == 1:
            return [StageStreams(CPU)]
        return [CudaStageStreams(CPU if one_gpu else torch.device("cpu", stage)) for stage in range(len(devices))]

    monkeypatch.setattr(pipeline, "make_streams", make_streams)


SMALL_MESSAGES = [
    "communication.bucket_mb=1e-6",
    "training.accumulation=2",
    "parallel.micro_batches=2",
    "parallel.partition=uniform",
]
PIPED = "parallel.pipeline=2"
ZERO_1, ZERO_2 = ZeroShard(0, 2), ZeroShard(0, 2, gradients=True)


class Loss(nn.Module):
    def forward(self, values: Tensor, targets: Tensor) -> Tensor:
        return ((values - targets) ** 2).sum()


def piped(
    checker: StreamChecker, monkeypatch: Patch, num_stages: int = 2, schedule: str = "1f1b", *, one_gpu: bool = True
) -> list[Tensor]:
    """Two steps and an evaluation of a small pipeline; the weights' gradients."""
    give_streams(monkeypatch, one_gpu=one_gpu)
    torch.manual_seed(0)
    modules = [*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(7)), Loss()]
    layers = [Layer(f"layer{number}", module, module) for number, module in enumerate(modules)]
    size = len(layers) // num_stages
    stages = [Stage(layers[start : start + size], CPU) for start in range(0, len(layers), size)]
    made = Pipeline(stages, schedule=schedule)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    with checker.paused():  # on the host
        batches = [MicroBatch(*((torch.randn(5, 8, generator=generator),) for _ in range(2))) for _ in range(6)]
    total = torch.zeros(())
    for _ in range(2):
        made.forward_backward([batches], 1.0, lambda loss: total.add_(loss))
        assert total.isfinite()
    torch.stack(made.evaluate(batches)).sum()
    made.close()
    return [weight.grad.clone() for module in modules for weight in module.parameters() if weight.grad is not None]


def two_ranks(checker: StreamChecker, *, ends_on_stream: bool = True) -> World:
    """As one of them, on two hosts."""
    world = World()
    world.size, world.ranks, world.hosts = 2, [0, 1], [world.host, "other"]
    world.link.horovod = StreamedHorovod(checker, 2, ends_on_stream=ends_on_stream)  # type: ignore[assignment]
    return world


def trained(
    checker: StreamChecker,
    monkeypatch: Patch,
    *,
    words: list[str],
    shard: ZeroShard = WHOLE,
    ends_on_stream: bool = True,
    record: bool = False,
    late: bool = False,
) -> None:
    """Three steps of a job as one of two ranks that see the same, an evaluation and a checkpoint.

    `late`: each step is read when the next one is queued.
    """
    give_streams(monkeypatch, one_gpu=True)
    leave_default_stream([CPU])
    one_at_a_time = {"gradients": 1, "parameters": 1}
    monkeypatch.setattr(engine, "transfer_sizes", lambda *given: transfer_sizes(*given)._replace(**one_at_a_time))
    world = two_ranks(checker, ends_on_stream=ends_on_stream)
    job = trainer(settings(*SMALL_MESSAGES, *words), world, zero_shard=shard)
    job.engine.timeline.recording = record
    if late:
        job.updates_ahead = True
        assert job.reads_late
        plans, queued = job.steps(), list[TrainingStep]()
        for _ in range(3):
            before = Clock(checker.host)
            queued.append(job.queue(next(plans)))
            # The host has waited for nothing; with ZeRO-2 for a number of the ranks' hosts, here a GPU's, too.
            assert checker.host == before or shard.gradients
            if len(queued) > 1:
                queued.pop(0).result()
        queued.pop().result()
    else:
        run(job, 3)
    job.evaluate("valid")
    job.capture("", 0, best=False)
    job.close()


@pytest.mark.parametrize("one_gpu", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_hand_over_what_is_ready_and_keep_it_while_it_is_used(
    checker: StreamChecker, monkeypatch: Patch, num_stages: int, schedule: str, one_gpu: bool
) -> None:
    found = piped(checker, monkeypatch, num_stages, schedule, one_gpu=one_gpu)
    assert not checker.problems
    plain = piped(checker, monkeypatch, 1)
    for own, wanted in zip(found, plain, strict=True):
        torch.testing.assert_close(own, wanted)


JOBS: dict[str, tuple[list[str], ZeroShard]] = {
    "alone": ([], WHOLE),
    "piped": ([PIPED], WHOLE),
    "zero-1": ([], ZERO_1),
    "zero-1 piped": ([PIPED, "optimizer.ema=0.9"], ZERO_1),
    "zero-2": ([], ZERO_2),
    "zero-2 piped": ([PIPED], ZERO_2),
    "zero-2 piped int8": ([PIPED, "communication.compression=int8"], ZERO_2),
    "fp16 piped": ([PIPED, "communication.compression=fp16"], WHOLE),
    "powersgd piped": ([PIPED, "communication.compression=powersgd", "communication.powersgd_rank=1"], WHOLE),
    "muon piped": ([PIPED, "optimizer.name=muon"], ZERO_1),
    "local steps": (["communication.local_steps=2", "optimizer.lr_scaling=linear"], WHOLE),
    "tensor parallel piped": ([PIPED, "parallel.tensor=2"], WHOLE),
}


QUICK = ["zero-1 piped", "zero-2 piped int8", "muon piped", "tensor parallel piped"]


@pytest.mark.parametrize("ends_on_stream", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in JOBS if name not in QUICK)]
)
def test_jobs_use_memory_in_order(checker: StreamChecker, monkeypatch: Patch, name: str, ends_on_stream: bool) -> None:
    words, shard = JOBS[name]
    trained(checker, monkeypatch, words=words, shard=shard, ends_on_stream=ends_on_stream)
    assert not checker.problems


@pytest.mark.parametrize("name", ["alone", "zero-1", "zero-2 piped", "tensor parallel piped"])
def test_steps_that_are_queued_ahead_use_memory_in_order(checker: StreamChecker, monkeypatch: Patch, name: str) -> None:
    words, shard = JOBS[name]
    trained(checker, monkeypatch, words=words, shard=shard, late=True)
    assert not checker.problems


def mute(monkeypatch: Patch, line: str) -> list[str]:
    """Leaves out a line of the source: calls of a stream's, an event's or a tensor's method from there do nothing."""
    muted: list[str] = []

    def unless_from_there(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            caller = sys._getframe(1)
            if linecache.getline(caller.f_code.co_filename, caller.f_lineno).strip().startswith(line):
                muted.append(line)
                return None
            return method(*args)

        return call

    methods = [(FakeStream, "wait_stream"), (FakeStream, "wait_event"), (Tensor, "record_stream")]
    for kind, name in (*methods, (torch.cuda, "set_device")):
        monkeypatch.setattr(kind, name, unless_from_there(getattr(kind, name)))
    return muted


def handed_over(checker: StreamChecker, monkeypatch: Patch, *, one_gpu: bool = True) -> None:
    """One stage sends the other a tensor that nobody keeps, and goes on."""
    first, second = (CudaStageStreams(CPU if one_gpu else torch.device("cpu", stage)) for stage in range(2))
    with first.computing():
        sent = first.send([torch.ones(3) + 1])
    with second.computing():
        received = second.receive(sent)
        del sent
        received[0].sum()
        del received
    with first.computing():
        torch.ones(3) + 1


def gathered(checker: StreamChecker, monkeypatch: Patch) -> None:
    """A stage of a tensor group gathers twice, as the vocabulary-parallel loss of two micro-batches."""
    group = RankTensorGroup(two_ranks(checker), "head")
    with CudaStageStreams(CPU).computing():
        for _ in range(2):
            group.gather(torch.ones(3) + 1).sum()


def looked_up(checker: StreamChecker, monkeypatch: Patch) -> None:
    """A stage on another GPU looks up rows of the last stage's tied embedding, on that GPU's default stream."""
    leave_default_stream([CPU])
    weight = torch.ones(3) + 1  # as it was updated
    CudaStageStreams(CPU).begin()
    with torch.cuda.stream(checker.default):  # type: ignore[arg-type]
        weight.sum()


MUTATIONS: list[tuple[str, str, Scenario]] = [
    ("self.compute.wait_stream(current)", "unordered", piped),
    ("torch.cuda.default_stream(self.device).wait_stream(current)", "unordered", looked_up),
    ("torch.cuda.current_stream(self.device).wait_stream(self.compute)", "unordered", piped),
    ("torch.cuda.set_device(self.device)", "context", piped),
    ("self.compute.wait_event(sent.ready)", "unordered", piped),
    ("tensor.record_stream(self.compute)", "reused", handed_over),
    ("sent.sender.sends.wait_event(sent.ready)", "unordered", partial(piped, one_gpu=False)),
    ("tensor.record_stream(sent.sender.sends)", "reused", partial(handed_over, one_gpu=False)),
    ("self.compute.wait_stream(self.arrivals)", "unordered", partial(piped, one_gpu=False)),
    ("moved.record_stream(self.compute)", "reused", partial(piped, one_gpu=False)),
    ("stream.wait_stream(torch.cuda.default_stream(result.device))", "unordered", partial(trained, words=[])),
    ("result.record_stream(stream)", "reused", partial(trained, words=[PIPED], shard=ZERO_1)),
    ("result.record_stream(stream)", "reused", gathered),
]


@pytest.mark.parametrize(("line", "kind", "scenario"), MUTATIONS)
def test_each_line_is_needed(
    checker: StreamChecker, monkeypatch: Patch, line: str, kind: str, scenario: Scenario
) -> None:
    muted = mute(monkeypatch, line)
    scenario(checker, monkeypatch)
    assert muted
    assert any(problem.startswith(kind) for problem in checker.problems)


def test_rows_of_a_tied_embedding_are_looked_up_after_its_update(checker: StreamChecker, monkeypatch: Patch) -> None:
    looked_up(checker, monkeypatch)
    assert not checker.problems


def test_what_is_copied_to_the_host_is_read_when_the_copy_has_ended(checker: StreamChecker) -> None:
    wait = start_copy(torch.ones(3) + 1)
    stream = checker.stack[-1]
    copied = stream.clock[stream]
    assert not checker.host.covers(stream, copied)
    found = wait()
    assert checker.host.covers(stream, copied)
    assert found.tolist() == [2, 2, 2]


def test_a_checkpoint_is_read_when_its_copies_have_ended(checker: StreamChecker) -> None:
    """They are written to memory that the GPU may write itself, until it is given back."""
    job = trainer(settings(), two_ranks(checker))
    run(job, 2)
    parts = job.capture("", 0, best=False).parts
    blocks = [block for part in parts.values() for _, block in part.blocks]
    assert len(blocks) > 1 and all(map(checker.host_may_read, blocks))
    assert checker.runtime.pinned == {block.data_ptr(): block.nbytes for block in blocks}
    job.close()
    del job, parts, blocks
    gc.collect()
    assert not checker.runtime.pinned


@pytest.mark.parametrize("compression", ["fp16", "fp16_fp32_sum"])
def test_the_host_does_not_wait_for_the_gradients_in_half_precision(
    checker: StreamChecker, monkeypatch: Patch, compression: str
) -> None:
    """It reads their largest ones, which scale those of the next step, when that begins."""
    config = settings(*SMALL_MESSAGES, f"communication.compression={compression}")
    job = trainer(config, two_ranks(checker))
    wire, waited = job.engine.grad_sync.wire, list[bool]()
    original = wire.end_step

    def end_step() -> None:
        before = Clock(checker.host)
        original()
        waited.append(checker.host != before)

    monkeypatch.setattr(wire, "end_step", end_step)
    run(job, 3)
    assert waited == [False] * 3
    job.close()


@pytest.mark.parametrize("aside", [False, True])
def test_recording_leaves_results_to_the_stream_that_uses_them(
    checker: StreamChecker, monkeypatch: Patch, aside: bool
) -> None:
    """On a CPU another thread waits for them, which on a GPU would have another stream."""
    if aside:
        monkeypatch.setattr(sync, "has_streams", lambda device: False)
    trained(checker, monkeypatch, words=[], record=True)
    assert bool(checker.problems) == aside


@pytest.mark.parametrize("leaves", [True, False])
def test_backward_goes_on_beside_a_collective_unless_it_is_on_the_default_stream(
    checker: StreamChecker, leaves: bool
) -> None:
    if leaves:
        leave_default_stream([CPU])
    world = two_ranks(checker)
    horovod: Any = world.link.horovod
    wait = world.all_reduce_async_(torch.ones(3), "bucket.0")
    torch.ones(2) + 1
    beside = not checker.stack[-1].clock.covers(horovod.stream, 1)
    wait()
    assert beside == leaves and checker.stack[-1].clock.covers(horovod.stream, 1)
