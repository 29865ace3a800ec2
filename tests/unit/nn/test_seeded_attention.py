"""Which of torch's fused kernels attention with dropout takes on a GPU; the kernels themselves are in tests/gpu."""

import threading
from typing import Any

import pytest
import torch
from fake_gpu import GPU, operators_called
from torch import Tensor

from hvd_transformer.nn import seeded_attention
from hvd_transformer.nn.dropout import Dropout, dropout_key


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


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """The GPU's, from which fused kernels read the seed of their mask."""
    found = torch.Generator().manual_seed(5)
    monkeypatch.setattr(torch.cuda, "default_generators", (found,))
    return found


def test_a_seed_is_the_devices_only_meanwhile(generator: torch.Generator) -> None:
    wanted = torch.Generator().manual_seed(5).get_state()
    with pytest.raises(ZeroDivisionError), seeded_attention._seeded(GPU, 7):
        torch.rand(3, generator=generator)
        assert generator.initial_seed() == 7
        raise ZeroDivisionError
    assert torch.equal(generator.get_state(), wanted)


def test_no_stage_seeds_the_generator_that_another_one_reads(generator: torch.Generator) -> None:
    inside, done, found = threading.Event(), threading.Event(), list[int]()

    def other() -> None:
        inside.wait(10)
        with seeded_attention._seeded(GPU, 8):
            found.append(generator.initial_seed())
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with seeded_attention._seeded(GPU, 7):
        inside.set()
        assert not done.wait(0.2)
        found.append(generator.initial_seed())
    thread.join()
    assert found == [7, 8]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_draw_by_the_place_of_the_dropout(
    generator: torch.Generator, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    original, seeds = seeded_attention._forward, list[int]()

    def forward(*args: Any) -> tuple[Tensor, ...]:
        seeds.append(generator.initial_seed())
        return original(*args)

    monkeypatch.setattr(seeded_attention, "_forward", forward)
    dropout = Dropout(0.1)
    with operators_called() as called, dropout_key(3, 1, 4):
        query, key, value = (torch.empty(2, 4, 16, 8, dtype=dtype, device=GPU) for _ in range(3))
        seeded_attention.attend(query, key, value, None, True, dropout)
        wanted = dropout.seed()
    assert seeds == [wanted]
    kind = "flash" if dtype == torch.bfloat16 else "efficient"
    assert [name for name in called if "attention" in name] == [f"_scaled_dot_product_{kind}_attention.default"]
