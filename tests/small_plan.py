"""A language model small enough to plan in a unit test, with its dimensions."""

from hvd_transformer.config import load
from hvd_transformer.planning.memory_plan import MemoryPlan, make_plan

V, LAYERS, D, F, T = 97, 3, 24, 40, 10
SMALL = [
    f"model.num_layers={LAYERS}", f"model.d_model={D}", "model.num_heads=4", f"model.d_feedforward={F}",
    "model.max_length=16", f"data.sequence_length={T}", "training.batch_size=6",
]  # fmt: skip


def small_plan(*words: str) -> MemoryPlan:
    return make_plan(load(overrides=[*SMALL, *words]), V)
