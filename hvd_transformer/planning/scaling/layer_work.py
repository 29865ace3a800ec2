"""What each layer of a model does in a step: FLOPs, weights, sums over a tensor group, memory.

It is known for two tensor degrees, 1 and another one. Everything about a layer is a part that all ranks of a tensor
group have and a part that they split, a + b / tp, so two degrees tell it for all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hvd_transformer.planning.pass_memory import PassMemory, PassMode


class Weight(NamedTuple):
    """One weight of a layer; a tied one belongs to the last layer that uses it."""

    size: float  # numbers
    width: int = 0  # of a row, if tokens look rows of it up
    dense: bool = True  # it has a gradient beside that of looked-up rows
    hidden: bool = False  # Muon updates it, if that is the optimizer
    shadowed: bool = False  # mixed precision keeps it in 16 bits, too


@dataclass(frozen=True)
class LayerWork:
    """One layer, for one micro-batch on one rank of a tensor group."""

    name: str
    weights: Sequence[Weight]
    forward_flops: float
    backward_flops: float  # weight gradients included
    deferred_flops: float = 0.0  # of these, the weight gradients that can be deferred
    activations: float = 0.0  # bytes kept by forward
    forward_sums: Sequence[float] = ()  # over the tensor group, in numbers each, in forward
    backward_sums: Sequence[float] = ()
    beside_sums: Sequence[float] = ()  # FLOPs of the weight gradient that is computed while each of them travels
    recompute: bool = False  # whether `parallel.recompute` applies
    passes: Mapping[PassMode, PassMemory] = field(default_factory=dict)

    @property
    def parameters(self) -> float:
        return sum(weight.size for weight in self.weights)


@dataclass(frozen=True)
class ModelWork:
    """The layers of a model for one micro-batch of `samples` samples of `tokens` tokens each.

    `whole` is on one rank; `split` on one of `degree` ranks (None: the model cannot be split). `lookups` are the tokens
    per sample that look up rows of embeddings.
    """

    samples: int
    tokens: int
    d_model: int
    whole: Sequence[LayerWork]
    split: Sequence[LayerWork] | None = None
    degree: int = 2

    @property
    def parameters(self) -> float:
        return sum(layer.parameters for layer in self.whole)

    def at(self, tensor: int, samples: int) -> list[LayerWork]:
        """The layers on one of `tensor` ranks, for a micro-batch of `samples` samples."""
        if tensor == 1:
            layers = list(self.whole)
        else:
            assert self.split is not None
            # a + b / tp through the values at 1 and at `degree`.
            part = (1 - 1 / tensor) / (1 - 1 / self.degree)
            split = [_between(one, other, part) for one, other in zip(self.whole, self.split, strict=True)]
            less = self.degree / tensor
            layers = [replace(one, beside_sums=[less * flops for flops in one.beside_sums]) for one in split]
        return layers if samples == self.samples else [_scaled(layer, samples / self.samples) for layer in layers]


def _between(one: LayerWork, other: LayerWork, part: float) -> LayerWork:
    def between(first: float, second: float) -> float:
        return first + (second - first) * part

    return replace(
        other,
        weights=[
            weight._replace(size=between(whole.size, weight.size))
            for whole, weight in zip(one.weights, other.weights, strict=True)
        ],
        forward_flops=between(one.forward_flops, other.forward_flops),
        backward_flops=between(one.backward_flops, other.backward_flops),
        deferred_flops=between(one.deferred_flops, other.deferred_flops),
        activations=between(one.activations, other.activations),
        passes={
            mode: PassMemory(*(round(between(*pair)) for pair in zip(one.passes[mode], memory, strict=True)))
            for mode, memory in other.passes.items()
        },
    )


def _scaled(layer: LayerWork, factor: float) -> LayerWork:
    """For a micro-batch of another size: in proportion."""
    return replace(
        layer,
        forward_flops=factor * layer.forward_flops,
        backward_flops=factor * layer.backward_flops,
        deferred_flops=factor * layer.deferred_flops,
        activations=factor * layer.activations,
        forward_sums=[factor * numbers for numbers in layer.forward_sums],
        backward_sums=[factor * numbers for numbers in layer.backward_sums],
        beside_sums=[factor * flops for flops in layer.beside_sums],
        passes={mode: PassMemory(*(round(factor * part) for part in memory)) for mode, memory in layer.passes.items()},
    )
