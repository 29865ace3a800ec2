"""Message sizes as users write them."""

import pytest

from hvd_transformer.bench.sizes import DEFAULT_SIZES, parse_sizes, show_size
from hvd_transformer.errors import UserError


def test_sizes_are_in_powers_of_1024_and_in_order() -> None:
    assert parse_sizes("8M, 1k,4,1GiB,2KB,1K") == [4, 1024, 2048, 8 * 2**20, 2**30]


def test_default_is_from_1_kb_to_256_mb() -> None:
    sizes = parse_sizes(DEFAULT_SIZES)
    assert (sizes[0], sizes[-1]) == (1024, 256 * 2**20)
    assert ",".join(map(show_size, sizes)) == DEFAULT_SIZES


@pytest.mark.parametrize("word", ["", "much", "0", "2", "6", "1T", "-4", "1.5K", "3G", "1K;2K", "٤K"])
def test_a_size_that_is_none(word: str) -> None:
    with pytest.raises(UserError, match=r"--sizes '.*': must be sizes such as 1K,8M,1G: from 4 bytes to 2G"):
        parse_sizes(f"1K,{word}")
