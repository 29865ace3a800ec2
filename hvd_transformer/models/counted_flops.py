"""FLOPs of a training step of a model of transformers: torch counts them, once, on a copy without memory.

Per sample they are a polynomial of degree two in the lengths: weights take products linear in a length, attention those
of two lengths. A few lengths determine it; then it gives the FLOPs of any batch without counting. What counts is as
in `models.flops`; weights that are not trained, as with LoRA, have no products for their gradients.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from itertools import chain, combinations_with_replacement, product
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

log = logging.getLogger("hvd_transformer")


class CountedFlops:
    """FLOPs of forward and backward. `longest`: the maximum lengths of the model's inputs, by the names of these."""

    def __init__(self, model: nn.Module, longest: Mapping[str, int]) -> None:
        # Fake tensors seem to be on the CPU: transformers asks the meta device for values.
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        outline = _without_memory(model, fake)
        self._longest = list(longest.values())
        # As many places as the polynomial has terms: 3 for one length, 6 for two.
        grid = [steps for steps in product(range(3), repeat=len(longest)) if sum(steps) <= 2]
        places = [
            {name: most - step * max(1, most // 3) for (name, most), step in zip(longest.items(), steps, strict=True)}
            for steps in grid
        ]
        terms = [self._terms(list(lengths.values())) for lengths in places]
        self._factors = np.linalg.solve(terms, [_count(outline, fake, lengths) for lengths in places])

    def of_batch(self, num_samples: int, lengths: Sequence[int]) -> float:
        """FLOPs of a batch whose inputs have these lengths, in the order of `longest`."""
        return float(num_samples * (self._factors @ self._terms(lengths)))

    def _terms(self, lengths: Sequence[int]) -> list[float]:
        parts = [length / most for length, most in zip(lengths, self._longest, strict=True)]
        return [one * other for one, other in combinations_with_replacement((1.0, *parts), 2)]


def counted_flops(model: nn.Module, longest: Mapping[str, int]) -> CountedFlops | None:
    """None if they cannot be counted, as in a model whose products depend on the values of tensors."""
    torchs = logging.getLogger("torch._subclasses.fake_tensor")  # tells each error with its whole stack
    was_disabled, torchs.disabled = torchs.disabled, True
    try:
        return CountedFlops(model, longest)
    except Exception as error:
        log.info("no mfu: FLOPs of %s cannot be counted: %s", type(model).__name__, error)
        return None
    finally:
        torchs.disabled = was_disabled


def _without_memory(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """A copy in evaluation mode, in which nothing is drawn or recomputed."""
    memo: dict[int, object] = {}
    with fake:
        for tensor in chain(model.parameters(), model.buffers()):
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo).eval()


def _count(model: nn.Module, fake: FakeTensorMode, lengths: Mapping[str, int]) -> int:
    """FLOPs of one sample. Attention keeps its weights for backward: no kernel computes them again."""
    counter = _Counter()
    with sdpa_kernel(SDPBackend.MATH), fake, counter:
        inputs = {name: torch.zeros(1, length, dtype=torch.int64) for name, length in lengths.items()}
        logits = model(**inputs, attention_mask=torch.ones_like(inputs["input_ids"])).logits
        logits.backward(torch.empty_like(logits))
    return counter.total


class _Counter(TorchDispatchMode):
    """Adds up FLOPs as torch's `FlopCounterMode`, in half the time, since it does not tell modules apart."""

    def __init__(self) -> None:
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that skips it takes time at each operation

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        result = function(*arguments, **options)
        if (flops := flop_registry.get(function.overloadpacket)) is not None:
            self.total += flops(*arguments, **options, out_val=result)
        return result
