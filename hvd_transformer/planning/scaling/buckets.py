"""Predicts the gradient buckets of `gradients.buffers`: which weights share one, and when backward completes it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvd_transformer.planning.scaling.layer_work import LayerWork, Weight


class Bucket(NamedTuple):
    """One bucket of one stage: complete when backward has passed its first layer, needed by forward from there on."""

    num_elements: float
    first_layer: int
    at_end: bool = False  # it waits for rows of looked-up tokens, which are added when backward has ended


def make_buckets(
    layers: Sequence[LayerWork], start: int, stop: int, max_elements: float, tokens: float, *, overlaps: bool = False
) -> list[Bucket]:
    """The buckets of the layers [start, stop) of the model, in the order in which backward fills them.

    A bucket has at most `max_elements`; a larger weight gets a bucket of its own. So does an embedding of more rows
    than `tokens`, which the step looks up: its bucket holds the dense gradient only, and is left out if there is none.
    Where transfers can overlap with backward (`overlaps`), other embeddings share no bucket with other weights.
    """
    if not overlaps:
        return _filled(layers, start, stop, max_elements, tokens, lambda weight: True)
    others = _filled(layers, start, stop, max_elements, tokens, lambda weight: weight.width == 0)
    return others + _filled(layers, start, stop, max_elements, tokens, lambda weight: weight.width > 0)


def _filled(
    layers: Sequence[LayerWork],
    start: int,
    stop: int,
    max_elements: float,
    tokens: float,
    chosen: Callable[[Weight], bool],
) -> list[Bucket]:
    buckets: list[Bucket] = []
    open_bucket: Bucket | None = None
    for index in reversed(range(start, stop)):
        for weight in filter(chosen, reversed(layers[index].weights)):
            if gathers_rows(weight, tokens):
                if weight.dense:
                    buckets.append(Bucket(weight.size, index))
                continue
            if open_bucket is not None and open_bucket.num_elements + weight.size > max_elements:
                buckets.append(open_bucket)
                open_bucket = None
            if open_bucket is None:
                open_bucket = Bucket(0.0, index)
            at_end = open_bucket.at_end or weight.width > 0
            open_bucket = Bucket(open_bucket.num_elements + weight.size, index, at_end)
    return buckets if open_bucket is None else [*buckets, open_bucket]


def gathers_rows(weight: Weight, tokens: float) -> bool:
    """Whether the ranks gather the gradient as rows: if the step looks up fewer `tokens` than the weight has rows."""
    return weight.width > 0 and tokens < weight.size / weight.width
