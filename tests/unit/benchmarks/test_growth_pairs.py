"""A rank with a hundred million prepared pairs holds none of them in memory."""

from benchmarks.growth.pairs import pairs

MOST = 200e6  # bytes above the model


def test_a_hundred_million_pairs_start_and_train_in_bounded_memory() -> None:
    """The files are holes where the file system has them."""
    found = pairs(10**8)
    held = {cost: point.median for cost, point in found.items() if cost.endswith("bytes")}
    assert len(held) == 2 and max(held.values()) < MOST
