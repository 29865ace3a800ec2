"""Dropout in compiled graphs: the values of eager dropout, and one graph for all blocks and steps."""

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from hvd_transformer.nn.compiled_dropout import set_dropout_keys
from hvd_transformer.nn.dropout import Dropout, dropout_key, number_dropouts, seeded_dropout
from hvd_transformer.nn.dry_run import assume_gpu

RATE = 0.3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), Dropout(RATE)

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.dropout(torch.relu(self.linear(values)), values)
        return result


def test_compiled_blocks_drop_what_eager_ones_drop() -> None:
    torch._dynamo.reset()
    blocks = nn.ModuleList([Block() for _ in range(3)])
    number_dropouts(blocks)
    set_dropout_keys(blocks)
    counter = CompileCounterWithBackend("aot_eager")
    for block in blocks:
        block.compile(backend=counter)
    values = torch.randn(16, 8)
    for step in range(4):
        for block in blocks:
            block.zero_grad()
            with dropout_key(1, step):
                found = block(values)
                found.square().sum().backward()
                seed = block.dropout.seed()
            gradient = block.linear.weight.grad.clone()
            block.zero_grad()
            kept = seeded_dropout(torch.ones(16, 8), RATE, seed)
            wanted = torch.relu(block.linear(values)) * kept + values
            wanted.square().sum().backward()
            torch.testing.assert_close(found, wanted)
            torch.testing.assert_close(gradient, block.linear.weight.grad)
            assert 0.5 < float((kept != 0).double().mean()) < 0.9
    assert counter.frame_count == 1  # a number of a block or a step as a constant would make more
    torch._dynamo.reset()


def test_on_a_gpu_backward_draws_the_mask_again() -> None:
    values, saved = torch.randn(40, 50, dtype=torch.float64, requires_grad=True), []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    dropout = Dropout(RATE)
    with assume_gpu(), dropout_key(3, 4), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = dropout(values)
        assert torch.equal(dropout(values.t().contiguous().t()), found)  # whatever the layout of its memory
    assert not saved
    found.sum().backward()
    torch.testing.assert_close(values.grad, found.detach() / values.detach())
    with assume_gpu(), dropout_key(3, 5):
        assert not torch.equal(dropout(values), found)
