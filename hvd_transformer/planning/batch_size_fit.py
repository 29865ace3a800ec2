"""The largest batch size that fits: the search, and whether a size fits by the plan's estimate."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from hvd_transformer.config.batch_size import with_batch_size
from hvd_transformer.config.schema import Config
from hvd_transformer.planning.host_memory import memory_on_host
from hvd_transformer.planning.memory_estimate import estimate_memory
from hvd_transformer.planning.model_costs import for_gpu
from hvd_transformer.planning.partition import DEVICE_RESERVE


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of ascending `sizes` that fits, if all below it do, too; None: none does.

    Doubles from the smallest until one does not fit, then bisects: none far too large is tried.
    """
    good, bad, trial = -1, len(sizes), 0
    while bad - good > 1:
        if fits(sizes[trial]):
            good = trial
        else:
            bad = trial
        doubled = min(bisect_left(sizes, 2 * sizes[max(good, 0)]), bad - 1)
        trial = doubled if bad == len(sizes) else (good + bad) // 2
    return None if good < 0 else sizes[good]


def fits_by_plan(config: Config, size: int, vocab_size: int, dp: int, num_bytes: float) -> bool:
    """Whether a batch size fits a GPU of `num_bytes`; for a CPU, into as much of the host, beside the copy that a
    checkpoint takes. Raises `UserError` if the task cannot be planned."""
    estimates = estimate_memory(with_batch_size(config, size), vocab_size, dp)
    needed = max(estimate.total for estimate in estimates) if for_gpu(config) else memory_on_host(estimates)
    return needed <= (1 - DEVICE_RESERVE) * num_bytes
