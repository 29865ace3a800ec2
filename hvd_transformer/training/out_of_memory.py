"""What a rank says when its memory runs out: what was allocated, beside what the device has, and what helps most."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hvd_transformer.comm.world import World
from hvd_transformer.config.schema import Config
from hvd_transformer.errors import WRONG_INPUT
from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.monitoring.host_usage import host_memory_left, peak_resident_bytes
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.parallel.pipeline import StageFailed
from hvd_transformer.planning.memory_estimate import MemoryEstimate, estimate_memory
from hvd_transformer.planning.memory_plan import vocabulary
from hvd_transformer.planning.memory_savings import Saving, savings, with_value
from hvd_transformer.planning.plan_text import bytes_text
from hvd_transformer.tasks.task import Task, largest_vocabulary

log = logging.getLogger(__name__)

_NUM_KEYS = 3  # that are named
# Of errors that are no torch.OutOfMemoryError: torch's allocator of the CPU, CUDA's and the libraries' own.
_WORDS = re.compile(r"out of memory|not enough memory|can't allocate memory|_ALLOC_FAILED")


class OutOfMemory(RuntimeError):
    """Its text is for the user; `code` is the exit code.

    A job that has made no step does not fit, and would not fit at the next start: wrong input. Later another process
    may have taken the memory, or fragmentation, which a new start removes.
    """

    def __init__(self, text: str, *, has_stepped: bool) -> None:
        super().__init__(text)
        self.code = 1 if has_stepped else WRONG_INPUT


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left; in a pipeline's stage, too."""
    if isinstance(error, StageFailed) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and bool(_WORDS.search(str(error)))


@contextmanager
def explain_out_of_memory(
    config: Config, mesh: ParallelMesh, task: Task, world: World, heartbeat: Heartbeat
) -> Iterator[None]:
    """Turn an error for lack of memory into `OutOfMemory`, which says what needs it and what helps."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        text = f"{world.link.who}: {_explain(error, config, mesh, task, world, heartbeat)}"
        log.error("%s", text, exc_info=error)
        raise OutOfMemory(text, has_stepped=heartbeat.loss is not None) from error


def _explain(
    error: Exception, config: Config, mesh: ParallelMesh, task: Task, world: World, heartbeat: Heartbeat
) -> str:
    on_cpu, evaluates = mesh.device.type == "cpu", heartbeat.phase == "evaluation"
    planned = with_value(config, "training.device", mesh.device.type)  # not auto
    try:
        vocab_size, _ = vocabulary(config, largest_vocabulary(task))
        estimates = estimate_memory(planned, vocab_size, mesh.dp, evaluation=evaluates)
        stage = None if on_cpu else _stage(error, [estimate.total for estimate in estimates])
        heartbeat.tick()
        resumes = heartbeat.step > 0
        found = savings(planned, vocab_size, mesh.dp, stage, evaluation=evaluates, resumes=resumes)[:_NUM_KEYS]
        plan = f"{_plan_words(estimates, stage)}. {_saving_words(found)}"
    except Exception as unknown:  # above all a task that cannot be planned; the memory is short whatever the reason
        log.info("no plan: %s", unknown)
        stage = None if on_cpu else _stage(error, [0] * len(mesh.devices))
        plan = f"A smaller training.{'eval_' if evaluates else ''}batch_size needs less"
    return f"out of memory {_when(heartbeat)}{_place(error)}; {_device_words(mesh.devices[stage or 0], world)}. {plan}"


def _when(heartbeat: Heartbeat) -> str:
    phase = heartbeat.phase
    if phase == "evaluation":
        return f"in the evaluation after step {heartbeat.step}"
    return f"in step {heartbeat.step + heartbeat.ahead + 1}" if phase in ("step", "log") else f"at the {phase}"


def _place(error: Exception) -> str:
    if isinstance(error, StageFailed):
        return f" ({str(error).partition(': ')[0]})"
    name = getattr(error, "failed_layer", None)
    return f" (layer {name})" if name else ""


def _stage(error: Exception, totals: Sequence[int]) -> int:
    """The stage whose device is full: the one that failed, or else the one that needs most."""
    found = re.match(r"stage (\d+)", str(error)) if isinstance(error, StageFailed) else None
    return int(found[1]) if found else totals.index(max(totals))


def _device_words(device: torch.device, world: World) -> str:
    if device.type == "cpu":
        host, peak = host_memory_left(), bytes_text(peak_resident_bytes() - world.bytes_of_others)
        has = (
            "" if host is None else f"the host has {bytes_text(host.total)}, {bytes_text(host.available)} of it free; "
        )
        return f"{has}this process had {peak} at most"
    free, total = torch.cuda.mem_get_info(device)
    peak = bytes_text(torch.cuda.max_memory_allocated(device))
    return f"{device} has {bytes_text(total)}, {bytes_text(free)} of it free; this process had {peak} allocated at most"


def _plan_words(estimates: Sequence[MemoryEstimate], stage: int | None) -> str:
    chosen = estimates if stage is None else [estimates[stage]]
    weights, gradients, optimizer, activations, loss = (bytes_text(sum(part)) for part in zip(*chosen, strict=True))
    return (
        f"The plan for it: {bytes_text(sum(estimate.total for estimate in chosen))} = weights {weights} + gradients "
        f"{gradients} + optimizer {optimizer} + activations {activations}, of which the loss with its logits {loss}"
    )


def _saving_words(found: Sequence[Saving]) -> str:
    if not found:
        return "No single key makes it smaller"
    return "By the plan it helps most to set " + ", ".join(
        f"{saving.key}={saving.value} (-{bytes_text(saving.num_bytes)}{saving.effect and f'; {saving.effect}'})"
        for saving in found
    )
