"""The keys of the section `training`."""

from typing import Annotated, Literal

from pydantic import Field

from hvd_transformer.config.sections.key import (
    LARGEST,
    OptionalCount,
    OptionalPositive,
    Section,
    changeable,
    fixed,
)
from hvd_transformer.errors import UserError

Count = Annotated[int, Field(ge=1, le=LARGEST)]


class TrainingConfig(Section):
    """Length, batch size, precision and evaluation."""

    epochs: int = changeable(1, "number of passes over the training split", ge=1)
    max_steps: OptionalCount = changeable(
        None, "stop after this many steps, if `epochs` do not end first; none: after `epochs`"
    )
    batch_size: Count | Literal["auto"] = changeable(
        8,
        "samples per replica and accumulation step; auto: the largest that fits into the memory of every rank, found "
        "once per run; needs global_batch_size",
        allowed=f"a number from 1 to {LARGEST}, or auto",
    )
    eval_batch_size: OptionalCount = changeable(None, "batch size in evaluation; none: batch_size")
    eval_batches: OptionalCount = changeable(
        None,
        "evaluate only the first eval_batches x eval_batch_size samples of a split, on any number of ranks; none: all "
        "of it",
    )
    accumulation: int = changeable(1, "gradient accumulation: number of accumulation steps per step", ge=1)
    global_batch_size: OptionalCount = changeable(
        None,
        "samples per step for any number of replicas; replaces accumulation: each replica takes as many accumulation "
        "steps as its part needs; with data.batch_tokens a step has global_batch_size / batch_size batches; none: "
        "batch_size x accumulation x replicas",
    )
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = fixed(
        "fp32",
        "precision of the computation (mixed precision: bf16, fp16); weights and optimizer state are at least fp32",
    )
    device: Literal["auto", "cpu", "cuda"] = changeable(
        "auto", "device; auto: GPUs if there are enough for all stages, otherwise the CPU"
    )
    log_every: int = changeable(10, "steps between two lines in metrics.jsonl", ge=1)
    eval_every: OptionalCount = changeable(None, "steps between two evaluations; none: at the end of each epoch")
    text_samples: int = changeable(
        0,
        "texts that the model writes into samples.jsonl at each evaluation: language_model continues passages of the "
        "validation text, translation shows its first sentences; 0: none",
        ge=0,
        le=10,
    )
    best_metric: str = changeable(
        "loss",
        "validation metric that selects the best checkpoint: loss, perplexity, accuracy, f1, bleu, NAME_loss of a "
        "source, …; with a leading minus: lower is better",
        min_length=1,
    )
    patience: OptionalCount = changeable(
        None, "early stopping: end after this many evaluations without improvement; none: never"
    )
    stall_seconds: OptionalPositive = changeable(
        None,
        "end a job that completes no step for this many seconds, with all stacks in its logs; none: ten times the "
        "longest of the last 100 steps, at least 30",
    )
    label_smoothing: float = fixed(
        0.0, "label smoothing: fraction of the target's weight that is spread over all classes or tokens", ge=0, lt=1
    )
    compile: bool = changeable(
        False,
        "compile fused kernels: on a CPU for training in fp32, with its C++ compiler; on a GPU whole blocks, with "
        "torch.compile. Where that cannot be, one line says why, and training continues without",
    )
    deterministic: bool = changeable(
        False, "deterministic kernels on a GPU, which are slower: runs repeat bit for bit, as they always do on a CPU"
    )

    @property
    def batch_samples(self) -> int:
        """`batch_size` as a number. Raises `UserError` if it has not been found yet."""
        if self.batch_size == "auto":
            raise UserError("training.batch_size=auto: is found when a job starts; here it must be a number")
        return self.batch_size
