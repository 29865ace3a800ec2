"""Labels texts with a trained classifier."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hvd_transformer.data.tokenizers import PAD
from hvd_transformer.inference.translation import padded


@torch.no_grad()
def classify(model: nn.Module, texts: Sequence[NDArray[np.unsignedinteger]], pad: int = PAD) -> Tensor:
    """The probabilities [B, C] of each text's classes, all texts at once; each has one token at least.

    `model` gives logits [B, C], as `models.classifier.Classifier` does.
    """
    tokens = padded(texts, pad).to(next(model.parameters()).device)
    probabilities: Tensor = model(tokens, tokens != pad).double().softmax(-1)
    return probabilities
