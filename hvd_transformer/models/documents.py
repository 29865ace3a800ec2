"""Several documents in one window: where each begins, and a mask by which none attends to another.

The token that ends a document belongs to it, as with `reset_position_ids` and `reset_attention_mask` of Megatron-LM
(Shoeybi et al. 2019, arXiv 1909.08053).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


def document_starts(tokens: Tensor, document_end: int) -> Tensor:
    """For each of the tokens [B, T], the place in its window at which its document begins [B, T], int64.

    The rest of a document at the beginning of a window begins at 0.
    """
    places = torch.arange(tokens.size(1), device=tokens.device)
    begins = F.pad(tokens[:, :-1] == document_end, (1, 0))
    return (begins * places).cummax(1).values


def document_places(starts: Tensor) -> Tensor:
    """The position of each token in its document [B, T], from `document_starts`."""
    return torch.arange(starts.size(1), device=starts.device) - starts


def document_mask(starts: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask to add to causal attention's scores [B, 1, T, T]: 0 within a document, otherwise minus infinity."""
    places = torch.arange(starts.size(1), device=starts.device)
    outside = (places < starts[..., None]) | (places > places[:, None])
    return torch.zeros(outside.shape, dtype=dtype, device=starts.device).masked_fill_(outside, -torch.inf)[:, None]


class Documents(NamedTuple):
    """The documents of a micro-batch: `document_starts` and, unless `nn.kernels` attends, which needs only those, the
    `document_mask`."""

    starts: Tensor
    mask: Tensor | None = None

    def added(self, dtype: torch.dtype) -> Tensor:
        """The mask in this number format."""
        return document_mask(self.starts, dtype) if self.mask is None else self.mask.to(dtype)


class SharedMasks:
    """One mask for all blocks of a stage: backward keeps what it attended with, which a mask per block would multiply.

    A mask lives as long as the starts that it was made from.
    """

    def __init__(self) -> None:
        self._made = WeakTensorKeyDictionary()

    def of(self, starts: Tensor, dtype: torch.dtype) -> Tensor:
        """The mask of these starts, in the number format of attention: `dtype`, or that of autocast."""
        kind = starts.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        mask: Tensor | None = self._made.get(starts)
        if mask is None or mask.dtype != dtype:
            mask = self._made[starts] = document_mask(starts, dtype)
        return mask
