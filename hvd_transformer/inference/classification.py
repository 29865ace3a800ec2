"""Labels texts with a trained classifier."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvd_transformer.data.tokenizers import PAD
from hvd_transformer.inference.translation import padded
from hvd_transformer.models.classifier import Classifier


@torch.no_grad()
def classify(model: Classifier, texts: Sequence[NDArray[np.unsignedinteger]]) -> Tensor:
    """The probabilities [B, C] of each text's classes, all texts at once; each has one token at least."""
    tokens = padded(texts).to(next(model.parameters()).device)
    probabilities: Tensor = model(tokens, tokens != PAD).double().softmax(-1)
    return probabilities
