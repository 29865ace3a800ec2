"""The memory of a stage: by hand, from its layers, and the same for training's partition as for the plan."""

import re
from functools import reduce

import pytest
import torch

from hvd_transformer.config import Config, load
from hvd_transformer.errors import UserError
from hvd_transformer.models.language_model import LanguageModel, language_model_layers
from hvd_transformer.nn.contracts import MicroBatch
from hvd_transformer.parallel.pipeline import Recompute
from hvd_transformer.parallel.pipeline_schedule import SCHEDULES, Operation
from hvd_transformer.planning.layer_profile import measure_layers
from hvd_transformer.planning.memory_plan import RECOMPUTES, make_plan
from hvd_transformer.planning.model_costs import fake_model
from hvd_transformer.planning.partition import best_partition
from hvd_transformer.planning.pass_memory import PASS_MODES, PassMemory, join_passes, run_pass, stage_activations

V, LENGTH, WIDTH, SAMPLES, PIECES = 97, 32, 48, 2, 6


def config(*words: str) -> Config:
    common = [
        "model.num_layers=3", f"model.d_model={WIDTH}", "model.num_heads=4", "model.d_feedforward=64",
        f"data.sequence_length={LENGTH}", "training.device=cpu", f"training.batch_size={SAMPLES * PIECES}",
        f"parallel.micro_batches={PIECES}", "parallel.pipeline=2",
    ]  # fmt: skip
    return load(overrides=[*common, *words])


def peak(operations: list[Operation], recompute: Recompute, whole: PassMemory, again: PassMemory) -> int:
    return stage_activations(
        operations, 0, recompute, {mode: again if mode.recompute else whole for mode in PASS_MODES}
    )


def test_peak_by_hand() -> None:
    """Forward 0, forward 1, backward 0, backward 1; whole a micro-batch keeps 10, computed again 3."""
    operations = [Operation(kind, number) for kind in ("forward", "backward") for number in (0, 1)]
    whole, again = PassMemory(0, forward=11, kept=10, backward=14, late=2), PassMemory(0, 6, 3, 9, 2)
    assert peak(operations, "never", whole, again) == 10 + 14
    assert peak(operations, "always", whole, again) == 3 + 9
    assert peak(operations, "except_last", whole, again) == 10 + 9
    in_turn = [Operation(kind, number) for number in (0, 1) for kind in ("forward", "backward")]
    assert peak(in_turn, "never", whole, again) == 14
    assert peak(in_turn, "except_last", PassMemory(0, 20, 10, 14, 2), again) == 20  # forward's own
    late = [*operations[:2], operations[2], operations[3], Operation("weights", 0), Operation("weights", 1)]
    assert peak(late, "never", whole, again) == 10 + 14
    assert peak(late, "always", whole, again) == 3 + 9
    slow = PassMemory(0, forward=6, kept=3, backward=13, late=8)
    assert peak(late, "never", slow, again) == 8 + 13  # the first one's weights still wait


def test_layers_joined_are_those_of_a_stage() -> None:
    """Counted one by one and put together, or all at once: the same but for a tensor or two that a whole stage lets go
    of earlier."""
    hidden = 4 * SAMPLES * LENGTH * WIDTH
    with fake_model(config("model.dropout=0.1"), V, SAMPLES) as (layers, batch, store, context, _):
        inputs, targets = batch.inputs, batch.targets
        for mode in PASS_MODES:
            tensors, alone = inputs, []
            for layer in layers:
                own = targets if layer is layers[-1] else ()
                found, tensors = run_pass([layer], tensors, own, store, context, mode)
                alone.append(found)
            stage, _ = run_pass(layers, inputs, targets, store, context, mode)
            joined = reduce(join_passes, alone)
            assert joined.inputs == stage.inputs
            for name in ("forward", "kept", "backward", "late"):
                assert getattr(joined, name) == pytest.approx(getattr(stage, name), abs=2 * hidden), (mode, name)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_partition_fits_if_the_plan_says_so(norm: str) -> None:
    """Training counts real layers one by one, the plan fake ones a stage at a time."""
    plans = [
        make_plan(config(f"model.norm={norm}", f"parallel.partition=[{cut}, {5 - cut}]"), V) for cut in (1, 2, 3, 4)
    ]
    model = LanguageModel(V, config(f"model.norm={norm}").model).train()
    tokens = torch.zeros(SAMPLES, LENGTH, dtype=torch.int64)
    layers, batch = language_model_layers(model), MicroBatch((tokens,), (tokens,))
    costs = measure_layers(layers, batch, torch.device("cpu"), recompute=True, seconds=0)
    for schedule in SCHEDULES:
        for recompute in RECOMPUTES:
            wanted = min(
                max(sum(plan.memory(stage)[:3]) + stage.activations[schedule, recompute] for stage in plan.stages)
                for plan in plans
            )
            settings = config(f"parallel.schedule={schedule}", f"parallel.recompute={recompute}")
            with pytest.raises(UserError, match="no partition into 2 stages fits") as caught:
                best_partition(settings, costs, PIECES, 1, 1)
            least = int(re.search(r"at least ([\d,]+) bytes", str(caught.value))[1].replace(",", ""))
            assert least == pytest.approx(wanted, rel=0.01), (schedule, recompute)
