"""The typed schema: every setting once, with its type, range, default and one line of documentation.

`hvd-train --help`, the checks, `config.yaml` and the rule of what may change when a run goes on all come
from here.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo


def setting(
    default: Any, description: str, *, may_change: bool = False, allowed: str | None = None, **limits: Any
) -> Any:
    """One key: its default, its line in `--help`, its range.

    `may_change`: a run may go on from a checkpoint although this key differs. `allowed`: what a list, a table or a
    union may be, for messages; pydantic's own name one of its parts only.
    """
    extra: dict[str, Any] = {"may_change": may_change, "allowed": allowed}
    return Field(default, description=description, json_schema_extra=extra, **limits)


def _none_word(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() in ("none", "null") else value


def _task_name(value: str) -> str:
    if value not in TASKS and not re.fullmatch(r"[\w.]+:\w+", value):
        raise ValueError(f"it should be {', '.join(map(repr, TASKS))} or package.module:Class")
    return value


TASKS = ("language_model", "translation", "classification")
TaskName = Annotated[str, AfterValidator(_task_name)]
# On the command line every value is a word: `training.max_steps=none` means no limit.
OptionalCount = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_none_word)]
OptionalPositive = Annotated[Annotated[float, Field(gt=0)] | None, BeforeValidator(_none_word)]
ClassWeights = Annotated[
    Literal["balanced"] | dict[str, Annotated[float, Field(gt=0)]] | None, BeforeValidator(_none_word)
]
OptionalName = Annotated[Annotated[str, Field(min_length=1)] | None, BeforeValidator(_none_word)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    # In YAML a label or a folder may look like a number.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True)


class ModelConfig(Section):
    """The Transformer."""

    pretrained: OptionalName = setting(
        None,
        "fine-tune what this Hugging Face folder holds, with its tokenizer: an encoder for classification, a causal "
        "model for language_model; its config.json stands for all other keys of model; none: a new model",
    )
    num_layers: int = setting(4, "Transformer blocks; of the encoder, where there is one", ge=1)
    num_decoder_layers: OptionalCount = setting(None, "blocks of a translation's decoder; none: num_layers")
    d_model: int = setting(192, "width; a multiple of num_heads", ge=1)
    num_heads: int = setting(6, "attention heads", ge=1)
    d_feedforward: int = setting(768, "width inside the feed-forward part", ge=1)
    dropout: float = setting(0.0, "share of activations dropped in training", ge=0, lt=1)
    max_length: int = setting(1024, "longest sequence the positions reach to, in tokens", ge=1)
    norm: Literal["pre", "post"] = setting(
        "pre", "layer norm before each part (and once at the end), or after each part"
    )
    activation: Literal["relu", "gelu"] = setting("gelu", "nonlinearity of the feed-forward part")
    position: Literal["sinusoidal", "learned", "rotary"] = setting(
        "sinusoidal", "how a token's position enters the model"
    )
    tie_embeddings: bool = setting(True, "the output layer uses the (target) token embedding's matrix")
    share_embeddings: bool = setting(
        False, "source and target have one vocabulary, learned from both, and one embedding"
    )
    loss_chunk: OptionalCount = setting(
        None,
        "tokens whose logits exist at once while the loss is computed; none: 256 on a CPU, 4096 on a GPU",
        may_change=True,
    )


class DataConfig(Section):
    """What is trained on, and how it is cut."""

    source: str = setting(
        "python-docs",
        "a folder with train.txt, valid.txt and test.txt or one text file, python-docs (embedded), wikitext2, "
        "wikitext103, penntreebank; of translation, multi30k, iwslt2016, wmt14 or pairs, and of classification a "
        "table, as a folder or a file",
        min_length=1,
    )
    split: list[Fraction] = setting(
        [0.9, 0.05, 0.05],
        "shares of train, valid and test when source is one file; two numbers: no test split",
        allowed="a list of two or three shares from 0 to 1, such as [0.9, 0.05, 0.05]",
        min_length=2,
        max_length=3,
    )
    tokenizer: Literal["basic_english", "char", "bpe"] = setting(
        "bpe", "torchtext's basic_english words, single characters, or byte-pair encoding"
    )
    vocab_size: OptionalCount = setting(None, "largest vocabulary, <unk> included; none: every token (bpe: 4096)")
    min_frequency: int = setting(1, "rarer tokens of the training split become <unk>", ge=1)
    batching: Literal["windows", "columns"] = setting(
        "windows",
        "windows: fixed-length pieces in an order given by seed and epoch; columns: the text in batch_size "
        "columns, each rank its own stretch of rows (the PyTorch tutorial's)",
    )
    sequence_length: int = setting(
        128, "tokens a sample; where samples differ in length: of the longest, of either side", ge=1
    )
    too_long: Literal["drop", "cut", "error"] = setting(
        "drop", "samples of more than sequence_length tokens: dropped and counted, cut there, or refused"
    )
    batch_tokens: OptionalCount = setting(
        None,
        "where samples differ in length: a round has as many as fit into this many tokens, padding included, not "
        "batch_size; none: batch_size",
        may_change=True,
    )
    source_language: str = setting("de", "translation: the ending of its files, train.de", min_length=1)
    target_language: str = setting("en", "translation: the ending of its files, train.en", min_length=1)
    train: OptionalName = setting(None, "name of the training split's files in source; none: train")
    valid: OptionalName = setting(None, "of the validation split's; none: valid, val, validation or dev")
    test: OptionalName = setting(None, "of the test split's; none: test, or the only one that begins so")
    text_column: str = setting("text", "classification: the column with the text", min_length=1)
    label_column: str = setting("label", "classification: the column with the label", min_length=1)
    positive_label: OptionalName = setting(
        None, "the label that precision, recall and f1 are of; none: the second of two, of more none"
    )
    class_weights: ClassWeights = setting(
        None,
        "how much a sample of each class counts in the loss: a number a label, {good: 1, bad: 2.5}, or balanced: the "
        "more the rarer the class is; none: all alike",
        allowed="balanced, none, or a number above 0 for each label, such as {good: 1, bad: 2.5}",
    )
    cache_dir: str = setting(
        "~/.cache/hvd-transformer/data",
        "where downloads, token files and measured layer times are kept",
        may_change=True,
    )
    workers: int = setting(0, "processes that prepare the token files; 0: one a core", may_change=True, ge=0)


class ParallelConfig(Section):
    """How the work is cut over ranks and devices."""

    pipeline: int = setting(1, "pipeline stages a rank, each on a device of its own", may_change=True, ge=1)
    tensor: int = setting(
        1,
        "ranks that share each layer's matrices, neighbours in rank order; the others are replicas",
        may_change=True,
        ge=1,
    )
    vocab_parallel: bool = setting(
        False, "the ranks of parallel.tensor share the embedding and the output layer, too", may_change=True
    )
    tensor_across_hosts: Literal["warn", "never"] = setting(
        "warn", "what to do where ranks that share matrices are on different hosts", may_change=True
    )
    optimizer_shard: Literal["none", "state", "gradients"] = setting(
        "none",
        "replicas share the optimizer: each updates its part of the weights with its part of the optimizer state, or "
        "of the gradients, too, which then are sent after every micro-batch",
        may_change=True,
    )
    micro_batches: int = setting(1, "a round's samples are cut into at most this many pieces", may_change=True, ge=1)
    schedule: Literal["gpipe", "1f1b", "zero_bubble"] = setting(
        "1f1b",
        "order of a stage's work: all forwards first; one forward, one backward, which holds fewer activations; or "
        "that with the weights' gradients kept for when a stage would wait",
        may_change=True,
    )
    partition: str | list[int] = setting(
        "auto",
        "layers a stage: auto (measured once, then the best of all cuts), uniform, a list such as [5, 4, 5], or "
        "package.module:function from a layer's name to its stage",
        may_change=True,
        allowed="auto, uniform, a list of layers a stage such as [5, 4, 5], or package.module:function",
    )
    recompute: Literal["never", "always", "except_last"] = setting(
        "never",
        "compute a block's activations again in backward, not keep them: for every micro-batch, or all but the last",
        may_change=True,
    )


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    name: Literal["sgd", "adam", "adamw"] = setting("adamw", "the update rule")
    lr: float = setting(1e-3, "peak learning rate of one data-parallel replica", gt=0)
    lr_scaling: Literal["linear", "sqrt", "none"] = setting(
        "linear",
        "how the rate grows with the number of replicas dp: lr x dp, lr x sqrt(dp), lr; where "
        "training.global_batch_size is set, global_batch_size / batch_size stands for dp",
    )
    weight_decay: float = setting(0.01, "weight decay; never on biases, norms and embeddings", ge=0)
    momentum: float = setting(0.0, "momentum of sgd", ge=0, lt=1)
    betas: tuple[Beta, Beta] = setting(
        (0.9, 0.95),
        "adam's and adamw's two decay rates",
        allowed="a list of two numbers from 0 to less than 1, such as [0.9, 0.95]",
    )
    eps: float = setting(1e-8, "adam's and adamw's epsilon", gt=0)
    clip_norm: OptionalPositive = setting(1.0, "largest norm of the whole gradient; none: no clipping")
    schedule: Literal["constant", "step", "cosine", "noam"] = setting(
        "cosine",
        "the rate after warm-up: constant; step: x gamma each epoch; cosine: down to lr x gamma at the end; "
        "noam: with the inverse root of the step",
    )
    warmup_steps: int = setting(0, "steps of linear warm-up from zero", ge=0)
    gamma: float = setting(0.1, "factor of the step and cosine schedules", ge=0, le=1)


class TrainingConfig(Section):
    """How long, how much at once, in which precision."""

    epochs: int = setting(1, "passes over the training split", may_change=True, ge=1)
    max_steps: OptionalCount = setting(None, "stop after this many steps; none: after the epochs", may_change=True)
    batch_size: int = setting(8, "samples a replica takes in one round", may_change=True, ge=1)
    eval_batch_size: OptionalCount = setting(None, "the same in evaluation; none: batch_size", may_change=True)
    accumulation: int = setting(1, "rounds a step", may_change=True, ge=1)
    global_batch_size: OptionalCount = setting(
        None,
        "samples a step sees whatever the number of replicas, each of which takes the rounds that its part needs, in "
        "place of accumulation; none: batch_size x accumulation x replicas",
        may_change=True,
    )
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = setting(
        "fp32", "number format of the computation; weights and sums are never below fp32"
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "auto: a GPU a rank where there is one, else the CPU", may_change=True
    )
    log_every: int = setting(10, "steps between two lines of metrics.jsonl", may_change=True, ge=1)
    eval_every: OptionalCount = setting(
        None, "steps between two evaluations; none: at the end of each epoch", may_change=True
    )
    best_metric: str = setting(
        "loss",
        "metric of the validation split that tells the best checkpoint: loss, perplexity, accuracy, f1, bleu, …; "
        "with a minus before it, the lower the better",
        may_change=True,
        min_length=1,
    )
    patience: OptionalCount = setting(
        None, "end training after so many evaluations that brought no better one; none: never", may_change=True
    )
    stall_seconds: OptionalPositive = setting(
        None,
        "seconds without a step after which a job is ended, with all stacks in its logs; none: ten times the longest "
        "of the last 100 steps, 30 at least",
        may_change=True,
    )
    label_smoothing: float = setting(
        0.0, "share of a target's weight that is spread over all classes or tokens", ge=0, lt=1
    )
    compile: bool = setting(False, "compile the model's layers with torch.compile", may_change=True)


class TranslationConfig(Section):
    """How a translation is searched for, in evaluation and by `translate`."""

    beam: int = setting(4, "hypotheses kept at each step; 1: greedy search", may_change=True, ge=1)
    length_penalty: float = setting(
        0.6, "above 0 favours longer translations (Wu et al. 2016)", may_change=True, ge=0, le=10
    )


class CommunicationConfig(Section):
    """What Horovod sends, and when."""

    bucket_mb: float = setting(
        8.0, "size of one flat gradient bucket, in MiB; each is one allreduce", may_change=True, gt=0
    )
    compression: Literal["none", "fp16"] = setting(
        "none",
        "number format of gradients on the wire; fp16 halves the bytes and rounds the sums",
        may_change=True,
    )
    overlap: bool = setting(True, "send each bucket as soon as it is full, while backward goes on", may_change=True)
    embedding_rows: Literal["auto", "always", "never"] = setting(
        "auto",
        "send the gradient of embedding lookups as one row a token, not as a matrix of the vocabulary's size; "
        "auto: while a step has fewer tokens than the vocabulary",
        may_change=True,
    )


class CheckpointConfig(Section):
    """What is kept on disk, and where a run goes on from."""

    every_steps: OptionalCount = setting(
        200, "steps between two checkpoints; none: only with every_seconds and at the end", may_change=True
    )
    every_seconds: OptionalPositive = setting(
        None, "seconds between two checkpoints, beside every_steps", may_change=True
    )
    keep_last: int = setting(3, "newest checkpoints kept", may_change=True, ge=1)
    keep_best: bool = setting(
        True, "keep the best checkpoint by training.best_metric, and test that one at the end", may_change=True
    )
    resume: str = setting(
        "auto",
        "auto: go on where output_dir's newest whole checkpoint ends; never: refuse an output_dir that has "
        "one; or the checkpoint (or run directory) to start from",
        may_change=True,
    )


class Config(Section):
    """A whole job."""

    task: TaskName = setting(
        "language_model",
        "what is trained: language_model, translation, classification, or package.module:Class of your own",
    )
    output_dir: str = setting("runs/default", "the run directory", may_change=True, min_length=1)
    profile: bool = setting(
        False, "write timeline-NNN.json, a Chrome trace a rank, of the steps 3 to 7 of this start", may_change=True
    )
    seed: int = setting(1, "seed of the weights, of the data order and of dropout", ge=0, lt=2**63)
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    translation: TranslationConfig = TranslationConfig()
    communication: CommunicationConfig = CommunicationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


def flatten(config: Config) -> dict[str, Any]:
    """The configuration as dotted keys, in the schema's order: {"task": …, "model.num_layers": …}."""
    flat: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            flat[name] = value
    return flat


KEYS: tuple[str, ...] = tuple(flatten(Config()))
SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(key.split(".")[0] for key in KEYS if "." in key))


def field(key: str) -> FieldInfo:
    """The schema's entry of a dotted key."""
    section, _, name = key.rpartition(".")
    model = Config.model_fields[section].annotation if section else Config
    assert isinstance(model, type) and issubclass(model, Section)
    return model.model_fields[name]


def may_change(key: str) -> bool:
    """Whether a run may go on from a checkpoint made with another value of this dotted key."""
    return bool(_extra(key)["may_change"])


def allowed(key: str) -> str | None:
    """What the value of this dotted key may be, in words; None where its type and limits say it."""
    found = _extra(key)["allowed"]
    return None if found is None else str(found)


def _extra(key: str) -> dict[str, Any]:
    extra = field(key).json_schema_extra
    assert isinstance(extra, dict)
    return extra
