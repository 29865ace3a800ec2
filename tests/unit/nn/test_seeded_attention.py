"""Which of torch's fused kernels attention with dropout takes on a GPU; the kernels themselves are in tests/gpu."""

import pytest
import torch

from hvd_transformer.nn import seeded_attention


@pytest.mark.parametrize(
    ("capability", "width", "dtype", "flash"),
    [
        ((9, 0), 256, torch.bfloat16, True),
        ((8, 0), 256, torch.float16, True),
        ((8, 9), 192, torch.bfloat16, True),
        ((8, 9), 256, torch.bfloat16, False),  # whose backward computes nothing with dropout
        ((12, 0), 200, torch.float16, False),
        ((7, 5), 64, torch.float16, False),  # a T4
        ((9, 0), 64, torch.float32, False),
    ],
)
def test_flash_attention_where_it_is_right(
    capability: tuple[int, int], width: int, dtype: torch.dtype, flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query = torch.empty(1, 2, 8, width, dtype=dtype, device="meta")
    assert seeded_attention._takes_flash(query, None) == flash
    assert not seeded_attention._takes_flash(query, torch.zeros(1))


def test_the_question_leaves_a_compiled_graph_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))

    def chosen(query: torch.Tensor) -> torch.Tensor:
        return query + 1 if seeded_attention.is_ampere(query) else query

    compiled = torch.compile(chosen, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(2)).tolist() == [1, 1]
