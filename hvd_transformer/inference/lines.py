"""Works on lines of text, some hundred at a time: those of about the same length together, and in order again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from numpy.typing import NDArray

Result = TypeVar("Result")
Tokens = NDArray[Any]
WINDOW = 512  # lines read before the first result


def in_batches(
    lines: Iterable[str],
    encode: Callable[[Sequence[str]], Sequence[Tokens]],
    work: Callable[[list[Tokens]], Sequence[Result]],
    batch_size: int,
    window: int = WINDOW,
) -> Iterator[tuple[str, Result | None]]:
    """Each line with its result, in order; None for one without a token. `work` gets `batch_size` lines at most."""
    iterator = iter(lines)
    while some := list(islice(iterator, window)):
        encoded = encode(some)
        order = sorted((number for number in range(len(some)) if len(encoded[number])), key=lambda n: len(encoded[n]))
        results: dict[int, Result] = {}
        for first in range(0, len(order), batch_size):
            numbers = order[first : first + batch_size]
            results |= zip(numbers, work([encoded[number] for number in numbers]), strict=True)
        for number, line in enumerate(some):
            yield line, results.get(number)
