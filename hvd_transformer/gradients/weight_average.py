"""An exponential moving average of the weights, beside the flat parameters and sharded like them.

Training goes on with the raw weights; evaluation and whoever uses a checkpoint take the averaged ones. They are less
noisy than any single step's (Polyak & Juditsky 1992; Izmailov et al. 2018, arXiv 1803.05407).

    training      parameters = raw         beside = averaged
    exchanged     parameters = averaged    beside = raw           while evaluating, and while a checkpoint is copied
"""

from collections.abc import Sequence

import torch

from hvd_transformer.gradients.buffers import GradBuffer


class WeightAverage:
    """The average of the buffers' own parameters; `beside` has one flat tensor per buffer."""

    def __init__(self, buffers: Sequence[GradBuffer], decay: float) -> None:
        self._buffers, self._decay = buffers, decay
        self.beside = [buffer.own_parameters.clone() for buffer in buffers]
        self.num_updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Average the weights of one more update.

        The decay starts at 0 and grows with the number of updates, as in TensorFlow's ExponentialMovingAverage: a short
        run does not remember its random start.
        """
        decay = min(self._decay, self.num_updates / (self.num_updates + 9))
        self.num_updates += 1
        for buffer, average in zip(self._buffers, self.beside, strict=True):
            average.lerp_(buffer.own_parameters, 1 - decay)

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap what is in the parameters and beside them."""
        for buffer, beside in zip(self._buffers, self.beside, strict=True):
            held = beside.clone()
            beside.copy_(buffer.own_parameters)
            buffer.own_parameters.copy_(held)
