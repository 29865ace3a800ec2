"""Lookups that give their gradient as rows: the same numbers as torch's own embedding, and none in the weight."""

import torch
from grad_sinks import Sink
from torch import Tensor

from hvd_transformer.nn.parallel_layers import VocabParallelEmbedding

TOKENS = torch.tensor([[3, 1, 3], [0, 3, 4]])


def test_rows_add_up_to_torchs_gradient() -> None:
    embedding = VocabParallelEmbedding(6, 4, dtype=torch.float64)
    plain = torch.nn.Embedding(6, 4, dtype=torch.float64)
    plain.load_state_dict(embedding.state_dict())
    taken: list[tuple[Tensor, Tensor]] = []
    embedding.embedding_grads = Sink(lambda tokens, rows: taken.append((tokens, rows)))
    vectors, wanted = embedding(TOKENS), plain(TOKENS)
    assert torch.equal(vectors, wanted)
    for result in (vectors, wanted):
        (result.sin() * result).sum().backward()
    ((tokens, rows),) = taken
    assert torch.equal(tokens, TOKENS.flatten())
    assert embedding.weight.grad is None
    torch.testing.assert_close(torch.zeros(6, 4, dtype=torch.float64).index_add(0, tokens, rows), plain.weight.grad)


def test_it_is_torchs_own_embedding_otherwise() -> None:
    embedding = VocabParallelEmbedding(6, 4)
    embedding(TOKENS).sum().backward()
    assert embedding.weight.grad is not None
    embedding.embedding_grads = Sink(lambda tokens, rows: None)
    with torch.no_grad():
        assert not embedding(TOKENS).requires_grad


def test_a_tied_weight_is_complete_before_the_rest_of_backward() -> None:
    """Its output layer's part, without waiting for the lookup at the other end of the model."""
    embedding, events = VocabParallelEmbedding(6, 4), []
    embedding.embedding_grads = Sink(lambda tokens, rows: events.append("rows"))
    embedding.weight.register_post_accumulate_grad_hook(lambda _: events.append("dense"))
    hidden = embedding(TOKENS)
    between = hidden.tanh()
    between.register_hook(lambda _: events.append("between"))
    (between @ embedding.weight.t()).logsumexp(-1).sum().backward()
    assert events == ["dense", "between", "rows"]
