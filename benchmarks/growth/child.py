"""One measurement in a process of its own.

`python -m benchmarks.growth.child PART SIZE FILE` writes the costs as JSON.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from benchmarks.growth import corpus, hosts, model, pairs, ranks, steps
from benchmarks.growth.fit import Point


class Part(NamedTuple):
    """What is measured at which sizes, and how often. `of`: what the sizes count."""

    measure: Callable[[int], dict[str, Point]]
    of: str
    sizes: Sequence[int]
    rounds: int = 3


# "parameters" are given as widths and counted by the model.
PARTS = {
    "layers": Part(model.layers, "layers", (4, 8, 16, 24, 32, 48, 64)),
    "parameters": Part(model.parameters, "parameters", (64, 128, 192, 256, 384, 512)),
    "vocabulary": Part(model.vocabulary, "words", (1000, 4000, 8000, 16_000, 32_000, 64_000)),
    "ranks": Part(ranks.ranks, "ranks", (1, 2, 3, 4, 6, 8, 12, 16, 24), 2),
    "hosts": Part(hosts.hosts, "hosts", (1, 2, 4, 8, 16, 32, 64), 2),
    "steps": Part(steps.steps, "steps", (100, 316, 1000, 3162, 10_000, 31_623, 100_000)),
    "corpus": Part(corpus.characters, "MB", (1, 3, 10, 30, 100, 300, 1000), 2),
    "words": Part(corpus.words, "MB", (1, 3, 10, 30, 100, 300, 1000), 2),
    "pairs": Part(pairs.pairs, "pairs", (10**4, 10**5, 10**6, 10**7, 10**8)),
    "byte-pairs": Part(corpus.byte_pairs, "MB", (1, 2, 4, 8, 16, 32), 2),
}


def main(part: str, size: int, file: Path) -> None:
    """Measures, and writes {cost: point}."""
    found = PARTS[part].measure(size)
    file.write_text(json.dumps({cost: asdict(point) for cost, point in found.items()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
