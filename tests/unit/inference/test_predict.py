"""Lines in batches of similar length."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hvd_transformer.inference.predict import in_batches


@pytest.mark.parametrize(("batch_size", "wanted"), [(100, [100] * 5 + [12] + [88]), (600, [600])])
def test_a_batch_has_as_many_lines_as_was_asked_for(batch_size: int, wanted: list[int]) -> None:
    sizes: list[int] = []

    def encode(lines: Sequence[str]) -> list[Any]:
        return [np.zeros(len(line), np.uint32) for line in lines]

    def work(texts: list[Any]) -> list[int]:
        sizes.append(len(texts))
        return [len(text) for text in texts]

    lines = ["x" * (1 + number * 7 % 13) for number in range(600)]
    assert list(in_batches(lines, encode, work, batch_size)) == [(line, len(line)) for line in lines]
    assert sizes == wanted


def test_a_line_of_white_space_has_no_result() -> None:
    """As in training, which leaves it out; a tokenizer may have tokens for it."""
    lines = ["a b", "   ", "\t\t", "\u00a0", "", "c"]
    found = in_batches(
        lines, lambda some: [np.zeros(len(line), np.uint32) for line in some], lambda own: ["x"] * len(own), 4
    )
    assert [result for _, result in found] == ["x", None, None, None, None, "x"]
