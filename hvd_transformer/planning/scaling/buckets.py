"""Which weights share a bucket, and what backward sends when (`gradients.buffers`, `gradients.sync`)."""

from collections.abc import Sequence
from typing import NamedTuple

from hvd_transformer.planning.scaling.layer_work import LayerWork, Weight


class Bucket(NamedTuple):
    """One bucket of one stage: filled by backward when its first layer is done, needed by forward from there on."""

    numbers: float
    first_layer: int
    at_end: bool = False  # it waits for rows of looked-up tokens, which are added when backward has ended


def make_buckets(layers: Sequence[LayerWork], start: int, stop: int, most: float, tokens: float) -> list[Bucket]:
    """The buckets of the layers [start, stop) of the model, in the order in which backward fills them.

    `most` numbers fit into a bucket; a larger weight has one alone. Embeddings of more rows than `tokens`, which the
    step looks up, have one alone; it has the dense gradient only, and none if there is none.
    """
    buckets: list[Bucket] = []
    filling: Bucket | None = None
    for index in reversed(range(start, stop)):
        for weight in reversed(layers[index].weights):
            if gathers_rows(weight, tokens):
                if weight.dense:
                    buckets.append(Bucket(weight.size, index))
                continue
            if filling is not None and filling.numbers + weight.size > most:
                buckets.append(filling)
                filling = None
            numbers, at_end = (0.0, False) if filling is None else (filling.numbers, filling.at_end)
            filling = Bucket(numbers + weight.size, index, at_end or weight.width > 0)
    return buckets if filling is None else [*buckets, filling]


def gathers_rows(weight: Weight, tokens: float) -> bool:
    """Whether the gradient of looked-up rows travels as rows: if the step looks up fewer `tokens` than it has rows."""
    return weight.width > 0 and tokens < weight.size / weight.width
