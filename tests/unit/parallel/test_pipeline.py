"""The engine alone: what it holds, what it hands over, and how it ends when something fails."""

import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hvd_transformer.comm.group import PeerLost
from hvd_transformer.nn.contracts import Layer, MicroBatch
from hvd_transformer.parallel.pipeline import Pipeline, Stage, StageFailed
from hvd_transformer.parallel.pipeline_schedule import SCHEDULES, ScheduleName, make_schedule

CPU = torch.device("cpu")
NUM_LAYERS = 8


class Scale(nn.Module):
    """values × weight for a tuple of values and a mask that has no gradient, which it passes on."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0 + number / 10, dtype=torch.float64))

    def forward(self, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return (values * self.weight).sin(), mask


class Loss(nn.Module):
    def forward(self, values: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        return (((values - targets) ** 2) * mask).sum()


def made(num_stages: int, wrap: Callable[[str, nn.Module], Callable] = lambda name, module: module, **options):
    """(modules, pipeline) of 8 layers and a loss, cut evenly."""
    modules = [*(Scale(number) for number in range(NUM_LAYERS)), Loss()]
    layers = [Layer(f"layer{number}", module, wrap(f"layer{number}", module)) for number, module in enumerate(modules)]
    ends = [len(layers) * stage // num_stages for stage in range(num_stages + 1)]
    stages = [Stage(layers[start:end], CPU) for start, end in zip(ends, ends[1:], strict=False)]
    return modules, Pipeline(stages, **options)


def train(pipeline: Pipeline, batches: list[MicroBatch], scale: float = 1.0) -> list[Tensor]:
    losses: list[Tensor] = []
    pipeline.forward_backward([batches], scale, losses.append)
    return losses


def micro_batches(count: int) -> list[MicroBatch]:
    """Of one to three samples each."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for number in range(count):
        size = 1 + number % 3
        values, targets = torch.randn(2, size, dtype=torch.float64, generator=generator)
        result.append(MicroBatch((values, torch.arange(size)), (targets,)))
    return result


def plain(modules: list[nn.Module], batches: list[MicroBatch]) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and gradients of the micro-batches one after the other."""
    losses = []
    for batch in batches:
        tensors = batch.inputs
        for module in modules[:-1]:
            tensors = module(*tensors)
        losses.append(modules[-1](*tensors, *batch.targets))
        (losses[-1] * 0.5).backward()
    grads = [module.weight.grad.clone() for module in modules[:-1]]
    for module in modules[:-1]:
        module.weight.grad = None
    return [loss.detach() for loss in losses], grads


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 9])
def test_tuples_with_tensors_without_a_gradient(num_stages: int, schedule: str) -> None:
    modules, pipeline = made(num_stages, schedule=schedule)
    for count in (1, 4, 7):
        batches = micro_batches(count)
        losses, grads = plain(modules, batches)
        assert all(map(torch.equal, pipeline.evaluate(batches), losses))
        assert all(module.weight.grad is None for module in modules[:-1])
        assert all(map(torch.equal, train(pipeline, batches, 0.5), losses))
        assert all(torch.equal(module.weight.grad, grad) for module, grad in zip(modules[:-1], grads, strict=True))
        for module in modules[:-1]:
            module.weight.grad = None
    pipeline.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_stage_does_what_its_schedule_says_and_in_that_order(schedule: ScheduleName) -> None:
    """The weights' part, where it is no operation of its own, at once after its backward."""
    done: dict[int, list[tuple[str, int]]] = {0: [], 1: [], 2: []}

    class Noted(torch.autograd.Function):
        """Identity that notes what comes by, and leaves work for later."""

        @staticmethod
        def forward(ctx, values: Tensor, stage: int, number: int) -> Tensor:
            ctx.stage, ctx.number = stage, number
            done[stage].append(("forward", number))
            return values.clone()

        @staticmethod
        def backward(ctx, grad: Tensor):
            stage, number = ctx.stage, ctx.number
            done[stage].append(("backward", number))
            pipeline.stages[stage].weight_grads.put(lambda: done[stage].append(("weights", number)))
            return grad, None, None

    calls: Counter[int] = Counter()

    def wrap(name: str, module: nn.Module):
        stage = int(name[5:]) // 3
        if name not in ("layer0", "layer3", "layer6"):  # the first of three stages of three layers
            return module

        def run(values: Tensor, mask: Tensor):
            calls[stage] += 1
            return module(Noted.apply(values.requires_grad_(), stage, calls[stage] - 1), mask)

        return run

    _, pipeline = made(3, wrap, schedule=schedule)
    train(pipeline, micro_batches(6))
    pipeline.close()
    for stage, operations in enumerate(make_schedule(schedule, 3, 6)):
        wanted = [tuple(operation) for operation in operations]
        if schedule != "zero_bubble":
            wanted = [
                entry
                for kind, number in wanted
                for entry in [(kind, number), *([("weights", number)] if kind == "backward" else [])]
            ]
        assert done[stage] == wanted


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages", [1, 3])
def test_each_stage_announces_its_last_backward_right_before_it(schedule: ScheduleName, num_stages: int) -> None:
    """So that its gradients are sent while it runs; with two accumulation steps only that of the second."""
    done: list[list[str]] = [[] for _ in range(num_stages)]

    class Noting:
        def expect_last_backward(self, buffers: list[int]) -> None:
            done[buffers[0]].append("last backward")

    def wrap(name: str, module: nn.Module):
        if int(name[5:]) not in {9 * stage // num_stages for stage in range(num_stages)}:
            return module
        stage = int(name[5:]) * num_stages // 9

        def run(values: Tensor, mask: Tensor):
            values = values.clone().requires_grad_() if not values.requires_grad else values.clone()
            values.register_hook(lambda grad: done[stage].append("backward"))
            return module(values, mask)

        return run

    _, pipeline = made(num_stages, wrap, schedule=schedule, grad_sync=Noting())
    for number, stage in enumerate(pipeline.stages):
        stage.buffers = [number]
    pipeline.forward_backward([micro_batches(4), micro_batches(4)], 1.0, [].append)
    pipeline.close()
    assert done == [["backward"] * 7 + ["last backward", "backward"]] * num_stages


@pytest.mark.parametrize(("schedule", "most"), [("gpipe", [6, 6, 6]), ("1f1b", [3, 2, 1])])
def test_a_stage_holds_no_more_activations_than_its_schedule_says(schedule: str, most: list[int]) -> None:
    """Counted by when the tensors that stages keep are freed."""
    held, peak = Counter(), Counter()
    lock = threading.Lock()

    class Counted(torch.autograd.Function):
        """Identity whose saved state counts as long as the graph lives."""

        @staticmethod
        def forward(ctx, values: Tensor, stage: int) -> Tensor:
            ctx.stage = stage
            with lock:
                held[stage] += 1
                peak[stage] = max(peak[stage], held[stage])
            return values.clone()

        @staticmethod
        def backward(ctx, grad: Tensor):
            with lock:
                held[ctx.stage] -= 1
            return grad, None

    firsts = {"layer0": 0, "layer3": 1, "layer6": 2}  # of three stages of three layers

    def wrap(name: str, module: nn.Module):
        if name not in firsts:
            return module
        return lambda values, mask: module(Counted.apply(values.requires_grad_(), firsts[name]), mask)

    _, pipeline = made(3, wrap, schedule=schedule)
    train(pipeline, micro_batches(6))
    assert [peak[stage] for stage in range(3)] == most
    assert not any(held.values())
    pipeline.close()


@pytest.mark.parametrize(("recompute", "calls"), [("never", 5), ("always", 10), ("except_last", 9)])
def test_recompute_calls_a_layer_again(recompute: str, calls: int) -> None:
    counts: Counter[str] = Counter()

    def wrap(name: str, module: nn.Module):
        return lambda *tensors: counts.update([name]) or module(*tensors)

    _, pipeline = made(2, wrap, recompute=recompute)
    train(pipeline, micro_batches(5))
    # The input of the whole model has no gradient: nothing is computed again for it but by its own weight.
    assert counts["layer1"] == counts["layer6"] == calls
    pipeline.close()


class Trap(torch.autograd.Function):
    """Identity that fails in backward."""

    @staticmethod
    def forward(ctx, values: Tensor, error: Exception) -> Tensor:
        ctx.error = error
        return values.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        raise ctx.error


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("number", [0, 2, 5])
def test_a_failing_stage_stops_all_and_is_named(number: int, stage: int, direction: str, schedule: str) -> None:
    layer, error, calls = f"layer{3 * stage + 1}", ValueError("bad luck"), Counter()

    def wrap(name: str, module: nn.Module):
        def run(*tensors: Tensor):
            result = module(*tensors)
            calls[name] += 1
            if name == layer and calls[name] == number + 1:
                if direction == "forward":
                    raise error
                return Trap.apply(result[0], error), result[1]
            return result

        return run

    _, pipeline = made(3, wrap, schedule=schedule)
    with pytest.raises(StageFailed) as caught:
        train(pipeline, micro_batches(6))
    named = f"layer {layer}" if direction == "forward" else f"layers layer{3 * stage} to layer{3 * stage + 2}"
    assert str(caught.value) == f"stage {stage}, {named}, micro-batch {number}, {direction}: bad luck"
    assert caught.value.__cause__ is error
    # The workers are free again, and end.
    assert pipeline.map(lambda stage: stage) == [0, 1, 2]
    pipeline.close()
    assert not any(thread.name.startswith("stage-") for thread in threading.enumerate())


def test_a_lost_rank_is_told_as_such() -> None:
    modules, pipeline = made(2)

    def hook(_: Tensor) -> None:
        raise PeerLost("rank 1 lost another rank")

    modules[1].weight.register_post_accumulate_grad_hook(hook)
    with pytest.raises(PeerLost):
        train(pipeline, micro_batches(3))
    pipeline.close()
