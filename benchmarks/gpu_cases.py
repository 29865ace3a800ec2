"""The cases of `benchmarks.gpu`: models of a billion parameters and GPT-2 small, eager, compiled and piped."""

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_transformer.config import Config, load

VOCABULARY = 32_768
TUTORIAL_WORDS = 28_783  # of WikiText-2

# Random tokens teach nothing: a low rate keeps the loss finite.
COMMON = ("training.precision=bf16", "optimizer.lr=1e-6", "parallel.partition=uniform", "parallel.recompute=never")
# For the CPU, which compiles in fp32 only.
SMALL = ("model.num_layers=6", "model.d_model=64", "model.num_heads=8", "model.d_feedforward=64")
DRY = (*SMALL, "training.precision=fp32", "data.sequence_length=32", "training.batch_size=4")


@dataclass(frozen=True)
class Case:
    """One row: a preset with settings; the stages of a pipeline share the card, each with streams of its own."""

    name: str
    preset: str
    settings: Sequence[str]
    vocab_size: int = VOCABULARY
    checkpoint: bool = False  # measure one, too

    def config(self, *, dry: bool) -> Config:
        return load(self.preset, overrides=[*COMMON, *self.settings, *(DRY if dry else ["training.device=cuda"])])


def _both(name: str, preset: str, *settings: str, vocab_size: int = VOCABULARY, checkpoint: bool = False) -> list[Case]:
    return [
        Case(f"{name}, eager", preset, settings, vocab_size, checkpoint),
        Case(f"{name}, compiled", preset, [*settings, "training.compile=true"], vocab_size),
    ]


def _tutorial(batch_size: int, stages: int = 1, micro_batches: int = 1) -> list[str]:
    """A sequence has 35 tokens."""
    sizes = {"training.batch_size": batch_size, "parallel.pipeline": stages, "parallel.micro_batches": micro_batches}
    return [*(f"{key}={value}" for key, value in sizes.items()), "optimizer.warmup_steps=0"]


def cases() -> list[Case]:
    """The rows, in order."""
    pieces = [
        Case(
            f"tutorial-1b, 16k tokens in 4 micro-batches, {stages} stage{'s' if stages > 1 else ''}",
            "tutorial-1b",
            _tutorial(468, stages, 4),
            TUTORIAL_WORDS,
        )
        for stages in (1, 2, 4)
    ]
    return [
        *_both("tutorial-1b, 8k tokens", "tutorial-1b", *_tutorial(234), vocab_size=TUTORIAL_WORDS),
        *_both("llama-1b, 8k tokens", "llama-1b", "training.batch_size=4", checkpoint=True),
        *_both("gpt-small, 16k tokens", "gpt-small", "training.batch_size=16"),
        *_both("tutorial-1b, 16k tokens", "tutorial-1b", *_tutorial(468), vocab_size=TUTORIAL_WORDS),
        *pieces,
        *_both("llama-1b, 16k tokens", "llama-1b", "training.batch_size=8"),
    ]
