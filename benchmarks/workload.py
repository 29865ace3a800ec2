"""What every contestant trains: a language model on synthetic tokens in memory.

SETTINGS are the data-parallel benchmark's 7.26 million parameters; on top of them LARGE, 40 million, SMALL, whose steps
are short, PIPELINE, the pipeline's, and TENSOR, of the matrices that ranks share.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch

from hvd_transformer.config import Config, load
from hvd_transformer.data.sampler import Replica
from hvd_transformer.tasks.language_model_task import LanguageModelTask

NUM_TOKENS = 1_000_000
# 4 blocks of 789,760 weights, the tied embedding's 16,000 × 256 and the final norm's 512: 7,255,552.
SETTINGS = (
    "model.num_layers=4",
    "model.d_model=256",
    "model.num_heads=4",
    "model.d_feedforward=1024",
    "data.vocab_size=16000",
    "data.sequence_length=128",
    "training.batch_size=8",
    "training.device=cpu",
    "training.epochs=1000000",  # the driver says when it is over
    "optimizer.name=adamw",
    "optimizer.lr=1e-4",
    "optimizer.clip_norm=1.0",
    "optimizer.schedule=constant",
)
# 8 such blocks, the embedding's 1,000 × 256, the same and a bias in the head, a final norm: 6,831,592. The head is a
# third of a block, so that the layers cut well in two.
PIPELINE = (
    "model.num_layers=8",
    "model.tie_embeddings=false",
    "data.vocab_size=1000",
    "training.batch_size=16",
    "parallel.micro_batches=8",
)


# Its matrices shared: 4 blocks of 3,152,384 weights, the tied embedding's 4,096 × 512, a final norm: 14,707,712.
TENSOR = (
    "model.d_model=512",
    "model.num_heads=8",
    "model.d_feedforward=2048",
    "data.vocab_size=4096",
)
# 10 blocks of 3,152,384 weights, the tied embedding's 16,000 × 512, a final norm's 1,024: 39,716,864.
LARGE = (
    "model.num_layers=10",
    "model.d_model=512",
    "model.num_heads=8",
    "model.d_feedforward=2048",
    "training.batch_size=4",
)
# The model of the preset shakespeare-char, with 257 words: 826,240 parameters.
SMALL = (
    "model.d_model=128",
    "model.d_feedforward=512",
    "data.vocab_size=257",
    "data.sequence_length=64",
    "training.batch_size=12",
)


def make_config(settings: Sequence[str] = ()) -> Config:
    """The workload's configuration; everything else is the package's default. `settings`: KEY=VALUE words."""
    return load(overrides=[*SETTINGS, *settings])


class SyntheticTask(LanguageModelTask):
    """Random tokens, cut into windows by the package's own code."""

    def __init__(self, config: Config, replica: Replica) -> None:
        vocab_size = config.data.vocab_size
        assert vocab_size is not None
        tokens = np.random.default_rng(config.seed).integers(vocab_size, size=NUM_TOKENS, dtype=np.uint16)
        splits = {"train": tokens, "valid": tokens[:10_000]}
        torch.manual_seed(config.seed)
        tokenizer = SimpleNamespace(vocab_size=vocab_size, files=dict[str, str])
        data = SimpleNamespace(tokenizer=tokenizer, splits=splits)
        super().__init__(config, data, replica)
        self.batch_size = config.training.batch_size
