"""torch's Muon with our orthogonal direction in its closed form, in place of torch's steps in bfloat16."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from hvd_transformer.gradients.muon import STEPS


def by_singular_values(matrix: Tensor) -> Tensor:
    """Each step's polynomial of the singular values, which a bound has made at most 1."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / (1.01 * values.pow(8).sum().pow(1 / 8)).clamp(min=1e-30)  # a gradient may be zero
    for a, b, c in STEPS:
        values = a * values + b * values**3 + c * values**5
    return left @ values.diag() @ right


@contextmanager
def closed_form_in_torch() -> Iterator[None]:
    with patch("torch.optim._muon._zeropower_via_newtonschulz", lambda gradient, *_: by_singular_values(gradient)):
        yield
