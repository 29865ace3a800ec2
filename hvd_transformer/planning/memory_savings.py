"""Which keys would make a configuration take less memory, and how much less."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hvd_transformer.config.checks import check
from hvd_transformer.config.schema import Config, may_change
from hvd_transformer.errors import UserError
from hvd_transformer.nn.cross_entropy import GPU_CHUNK
from hvd_transformer.planning.memory_estimate import MemoryEstimate, estimate_memory
from hvd_transformer.planning.memory_plan import batch_samples
from hvd_transformer.planning.model_costs import for_gpu
from hvd_transformer.tasks.registry import task_class
from hvd_transformer.tasks.task import ExampleTask


class Saving(NamedTuple):
    """A key, the value to try, the bytes that the device in question would have less, and what else changes."""

    key: str
    value: str | int
    num_bytes: int
    effect: str = ""


def savings(
    config: Config,
    vocab_size: int,
    dp: int,
    stage: int | None,
    *,
    evaluation: bool = False,
    resumes: bool = False,
) -> list[Saving]:
    """What helps, the most first. `stage` is the one whose device is full; None: all stages share it.

    `resumes`: only keys with which the run can resume. Raises `UserError` if the task cannot be planned.
    """
    full = _needed(estimate_memory(config, vocab_size, dp, evaluation=evaluation), stage)
    found: dict[str, Saving] = {}
    for key, value in _candidates(config, dp, evaluation):
        if resumes and (not may_change(key) or key in _fixed_batch_keys(config)):
            continue
        try:
            changed = with_value(config, key, value)
            check(changed)
            needed = _needed(estimate_memory(changed, vocab_size, dp, evaluation=evaluation), stage)
        except UserError:  # cannot be, beside the other keys
            continue
        saved = full - needed
        if saved > (found[key].num_bytes if key in found else 0):
            found[key] = Saving(key, value, saved, _effect(config, key, resumes))
    return sorted(found.values(), key=lambda saving: -saving.num_bytes)  # of equal ones, the first candidate first


def with_value(config: Config, key: str, value: Any) -> Config:
    """The configuration with another value of one dotted key; another pipeline is partitioned anew."""
    section, _, name = key.partition(".")
    update = {name: value} | ({"partition": "auto"} if key == "parallel.pipeline" else {})
    return config.model_copy(update={section: getattr(config, section).model_copy(update=update)})


def _fixed_batch_keys(config: Config) -> set[str]:
    """The keys that a resumed run may not change, or not before its epoch ends (`training.run_directory`)."""
    if config.data.batching == "columns":
        return {"training.batch_size"}
    return {"training.batch_size", "data.batch_tokens"} if issubclass(task_class(config), ExampleTask) else set()


def _effect(config: Config, key: str, resumes: bool) -> str:
    """How another value of this key changes training itself, where the key does not say it."""
    if key not in ("training.batch_size", "data.batch_tokens"):
        return ""
    if config.training.global_batch_size is None or key == "data.batch_tokens":
        return "fewer samples per step"
    scaling = config.optimizer.lr_scaling
    # A resumed run keeps its rate.
    return "" if resumes or scaling == "none" else f"a higher learning rate by optimizer.lr_scaling={scaling}"


def _needed(estimates: Sequence[MemoryEstimate], stage: int | None) -> int:
    totals = [estimate.total for estimate in estimates]
    return sum(totals) if stage is None else totals[stage] if stage < len(totals) else max(totals)


def _candidates(config: Config, dp: int, evaluation: bool) -> Iterator[tuple[str, str | int]]:
    training, parallel, samples = config.training, config.parallel, batch_samples(config, dp)
    if evaluation:
        yield "training.eval_batch_size", max(1, (training.eval_batch_size or samples) // 2)
    else:
        tokens = config.data.batch_tokens
        key, size = ("training.batch_size", samples) if tokens is None else ("data.batch_tokens", tokens)
        yield "parallel.recompute", "always"
        yield "parallel.micro_batches", min(2 * parallel.micro_batches, samples)
        yield key, max(1, size // 2)
    if dp > 1:
        for shard in ("state", "gradients"):
            yield "parallel.optimizer_shard", shard
    yield "parallel.pipeline", 2 * parallel.pipeline
    yield "training.precision", "bf16"
    if config.model.loss_chunk or for_gpu(config):  # on a CPU it is small by itself
        yield "model.loss_chunk", max(1, (config.model.loss_chunk or GPU_CHUNK) // 4)
