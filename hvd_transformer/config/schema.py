"""The typed schema: each setting once, with its type, range, default and description.

It is the source of `hvd-train --help`, the checks, `config.yaml`, and the rules for what may change when a run resumes.
"""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo


def _key(may_change: bool, default: Any, description: str, *, allowed: str | None = None, **limits: Any) -> Any:
    """One key: its default, its description in `--help`, its range.

    `may_change`: a run may resume from a checkpoint in which this key differs. `allowed`: what a list, a table or a
    union may be, for messages; pydantic's messages name only one of the alternatives.
    """
    extra: dict[str, Any] = {"may_change": may_change, "allowed": allowed}
    return Field(default, description=description, json_schema_extra=extra, **limits)


# A resumed run must agree with its checkpoint in the fixed keys.
fixed, changeable = partial(_key, False), partial(_key, True)


def _none_word(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() in ("none", "null") else value


# On the command line every value is a word: `training.max_steps=none` means no limit.
OptionalCount = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_none_word)]
OptionalPositive = Annotated[Annotated[float, Field(gt=0)] | None, BeforeValidator(_none_word)]
ClassWeights = Annotated[
    Literal["balanced"] | dict[str, Annotated[float, Field(gt=0)]] | None, BeforeValidator(_none_word)
]
# As in the config.json of transformers; `config.checks` knows the keys.
RopeScaling = Annotated[dict[str, float | str] | None, BeforeValidator(_none_word)]
# `config.mixture` knows the keys.
Sources = Annotated[list[dict[str, float | str]] | None, Field(min_length=1), BeforeValidator(_none_word)]
LoraTargets = Annotated[
    Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] | None, BeforeValidator(_none_word)
]
OptionalBool = Annotated[bool | None, BeforeValidator(_none_word)]
OptionalName = Annotated[Annotated[str, Field(min_length=1)] | None, BeforeValidator(_none_word)]
Beta = Annotated[float, Field(ge=0, lt=1)]
OptionalDecay = Annotated[Annotated[float, Field(gt=0, lt=1)] | None, BeforeValidator(_none_word)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    # In YAML a label or a folder name may look like a number.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True)


class ModelConfig(Section):
    """The Transformer."""

    pretrained: OptionalName = fixed(
        None,
        "Hugging Face folder to fine-tune, with its tokenizer: an encoder for classification, a causal model for "
        "language_model, a Marian, M2M100 or NLLB for translation; its config.json replaces all other keys of model, "
        "but for dropout and loss_chunk of a Llama or a Qwen3; none: train from scratch",
    )
    lora_rank: OptionalCount = fixed(
        None,
        "LoRA, for a causal pretrained: train nothing but two matrices of this rank beside each of lora_targets; none: "
        "train all weights",
    )
    lora_alpha: OptionalPositive = fixed(
        None, "LoRA: what the matrices add is multiplied by lora_alpha / lora_rank; none: 8, as in peft"
    )
    lora_targets: LoraTargets = fixed(
        None,
        "LoRA: names of the layers, such as [q_proj, v_proj]; all-linear: all linear layers but the last one; none: "
        "peft's choice for the family",
        allowed="none, all-linear, or a list of layer names such as [q_proj, v_proj]",
    )
    vocab_size: OptionalCount = fixed(
        None,
        "language_model: rows of the embedding and the output layer, at least one per token of the tokenizer; none: as "
        "many as it has tokens",
    )
    num_layers: int = fixed(4, "number of Transformer blocks; in the encoder, if there is one", ge=1)
    num_decoder_layers: OptionalCount = fixed(None, "number of decoder blocks, for translation; none: num_layers")
    d_model: int = fixed(192, "model width; a multiple of num_heads", ge=1)
    num_heads: int = fixed(6, "number of attention heads", ge=1)
    num_kv_heads: OptionalCount = fixed(
        None,
        "number of key and value heads in self-attention, each for num_heads / num_kv_heads query heads (grouped-query "
        "attention); none: num_heads",
    )
    head_width: OptionalCount = fixed(None, "width of an attention head; none: d_model / num_heads")
    d_feedforward: int = fixed(768, "hidden width of the feed-forward layers", ge=1)
    dropout: float = fixed(0.0, "dropout probability during training", ge=0, lt=1)
    max_length: int = fixed(1024, "longest sequence that the model has positions for, in tokens", ge=1)
    norm: Literal["pre", "post"] = fixed(
        "pre", "layer norm before each sub-layer (and once at the end), or after each sub-layer"
    )
    norm_type: Literal["layer", "rms"] = fixed("layer", "layer norm, or root mean square norm (RMSNorm)")
    norm_eps: float = fixed(1e-5, "added to the variance in each norm", gt=0)
    qk_norm: bool = fixed(False, "RMSNorm of the queries and keys of each head in self-attention")
    activation: Literal["relu", "gelu", "swiglu"] = fixed(
        "gelu",
        "activation function of the feed-forward layers; swiglu: SiLU of one projection times another one, three "
        "matrices in all",
    )
    bias: bool = fixed(True, "biases in attention, feed-forward layers and layer norms")
    head_bias: OptionalBool = fixed(None, "a bias in the output layer; none: if tie_embeddings=false")
    scale_embedding: bool = fixed(True, "multiply token embeddings by the square root of d_model")
    position: Literal["sinusoidal", "learned", "rotary"] = fixed("sinusoidal", "type of position encoding")
    rope_theta: float = fixed(10000.0, "rotary: base of the wavelengths, 2π to 2π × rope_theta positions", gt=1)
    rope_scaling: RopeScaling = fixed(
        None,
        "rotary: how wavelengths are stretched for longer texts, as rope_scaling in a config.json: linear, llama3 or "
        "yarn, such as {rope_type: linear, factor: 2}",
        allowed="none, or a table such as {rope_type: linear, factor: 2}, rope_type being linear, llama3 or yarn",
    )
    init: Literal["default", "tutorial"] = fixed(
        "default",
        "initial weights; tutorial: as in the PyTorch tutorial, embeddings and output layer uniform within ±0.1, all "
        "other layers as torch.nn.TransformerEncoderLayer",
    )
    init_output: Literal["default", "zero"] = fixed(
        "default",
        "initial weights of the last matrix of each attention and feed-forward layer; zero: with norm=pre each block "
        "starts as the identity",
    )
    tie_embeddings: bool = fixed(True, "share the weights of the output layer and the (target) token embedding")
    share_embeddings: bool = fixed(
        False, "one vocabulary, learned from both languages, and one embedding for source and target"
    )
    loss_chunk: OptionalCount = changeable(
        None,
        "number of tokens whose logits are in memory at once in the loss; none: 256 on a CPU, or more up to"
        " 16 MiB of logits; 4096 on a GPU",
    )

    @property
    def in_own_blocks(self) -> bool:
        """Whether the model consists of this package's blocks: not with a `pretrained` of another family or with LoRA,
        which leaves all other keys at their defaults (`config.families`)."""
        return self.pretrained is None or self.position == "rotary"


LEARNED_TOKENIZERS = ("basic_english", "char", "bpe")


class DataConfig(Section):
    """The data set, its tokenizer and its batches."""

    source: str = fixed(
        "python-docs",
        "a folder with train.txt, valid.txt and test.txt, or one text file; .jsonl or .parquet instead of .txt: a "
        "document per line or row, also in shards: train-*.parquet, train/*.jsonl.gz, or a pattern such as "
        "'shards/*.jsonl.zst'; token files of nanoGPT (train.bin) and Megatron (.bin, .idx); or python-docs "
        "(built in), wikitext2, wikitext103, penntreebank; for translation: multi30k, iwslt2016, wmt14, or a folder or "
        "file of sentence pairs; for classification: a folder or file of tables",
        min_length=1,
    )
    sources: Sources = fixed(
        None,
        "language_model: a mixture instead of source: a list of tables such as {source: a.jsonl, weight: 0.7, epochs: "
        "2}; weight: its share of the samples, relative to the others (by default each sample counts the same); epochs "
        "(1): how often an epoch reads it or, with weights, at most; text_column: its own. none: only source",
        allowed="none, or a list of tables such as [{source: a.jsonl, weight: 0.7}, {source: b.jsonl, weight: 0.3}]",
    )
    split: list[Fraction] = fixed(
        [0.9, 0.05, 0.05],
        "fractions for train, valid and test if source is one file or a pattern; two numbers: no test split",
        allowed="a list of two or three fractions from 0 to 1, such as [0.9, 0.05, 0.05]",
        min_length=2,
        max_length=3,
    )
    tokenizer: str = fixed(
        "bpe",
        "basic_english: words, by torchtext; char: characters; bpe: byte-pair encoding; for a language model also a "
        "Hugging Face tokenizer.json, or the folder with it, with a slash in its name (./my-model), a .tiktoken file, "
        "or a .model file of SentencePiece",
        allowed="basic_english, char, bpe, or a Hugging Face tokenizer.json or its folder, such as ./my-model, or a "
        ".tiktoken or .model file",
        pattern=r"^(basic_english|char|bpe|.*[/.].*)$",
    )
    vocab_size: OptionalCount = fixed(None, "maximum vocabulary size, including <unk>; none: all tokens (bpe: 4096)")
    min_frequency: int = fixed(1, "tokens that are rarer than this in the training split become <unk>", ge=1)
    tokenizer_sample_mb: OptionalPositive = fixed(
        1024.0,
        "bpe: learn from at most this many MiB of the training split, spread evenly over it; more brings nothing but "
        "time and memory; none: all of it",
    )
    batching: Literal["windows", "columns"] = fixed(
        "windows",
        "windows: fixed-length samples, shuffled by seed and epoch; columns: the text in batch_size columns, with "
        "a separate stretch of rows for each rank (as in the PyTorch tutorial)",
    )
    document_mask: bool = fixed(
        False,
        "with batching=windows of documents: no token attends to another document, and positions start anew at each",
    )
    sequence_length: int = fixed(
        128, "tokens per sample; if samples differ in length: of the longest sample, on either side", ge=1
    )
    target_length: OptionalCount = fixed(
        None,
        "translation: tokens of the longest target; sequence_length is then that of the longest source only. Also the "
        "limit of what `translate` writes; none: sequence_length, and translations of up to 2 x source + 10 tokens",
    )
    too_long: Literal["drop", "cut", "error"] = fixed(
        "drop",
        "if samples differ in length: drop and count those of more than sequence_length (or target_length) tokens, "
        "truncate them, or stop with an error",
    )
    batch_tokens: OptionalCount = changeable(
        None,
        "if samples differ in length: batches are filled up to this number of tokens, including padding, instead of "
        "batch_size samples; none: batch_size",
    )
    source_language: str = fixed(
        "de",
        "translation: source language, the extension of its files (train.de); its code in a model.pretrained of many "
        "languages",
        min_length=1,
    )
    target_language: str = fixed("en", "translation: target language, as source_language (train.en)", min_length=1)
    train: OptionalName = fixed(
        None, "file name of the training split if source is a folder, without the ending (.txt, .csv, …); none: train"
    )
    valid: OptionalName = fixed(
        None, "file name of the validation split, as for train; none: valid, val, validation or, of samples, dev"
    )
    test: OptionalName = fixed(
        None,
        "file name of the test split, as for train; none: test or, of pairs, the only name that starts with it; for "
        "translation also a test set that sacrebleu downloads, such as sacrebleu:wmt14",
    )
    text_column: str = fixed(
        "text", "column with the text: of a table, or of documents in JSON lines or Parquet", min_length=1
    )
    messages_column: OptionalName = fixed(
        None,
        "instruction tuning: column of JSON lines with conversations, lists of messages with role and content, such as "
        "messages; model.pretrained's chat template makes it text, and the loss is on the assistant's tokens; none: "
        "plain text",
    )
    label_column: str = fixed("label", "classification: column with the label", min_length=1)
    positive_label: OptionalName = fixed(
        None, "label for precision, recall and f1; default: the second label if there are two, otherwise none"
    )
    class_weights: ClassWeights = fixed(
        None,
        "weight of each class in the loss: a number per label, such as {good: 1, bad: 2.5}; balanced: inversely "
        "proportional to its frequency; none: equal weights",
        allowed="balanced, none, or a number above 0 for each label, such as {good: 1, bad: 2.5}",
    )
    cache_dir: str = changeable(
        "~/.cache/hvd-transformer/data", "cache folder for downloads, token files and measured layer times"
    )
    workers: int = changeable(0, "number of processes or threads that prepare the token files; 0: one per core", ge=0)

    def length_of(self, role: str) -> int:
        """The maximum number of tokens of a sample's text in this role, such as "source" and "target"."""
        return self.target_length or self.sequence_length if role == "target" else self.sequence_length


class ParallelConfig(Section):
    """Data, tensor and pipeline parallelism over ranks and devices."""

    pipeline: int = changeable(1, "pipeline parallelism: stages per rank, each on its own device", ge=1)
    tensor: int = changeable(
        1, "tensor parallelism: number of consecutive ranks that share each layer's matrices and form one replica", ge=1
    )
    vocab_parallel: bool = changeable(
        False, "also split the embedding and the output layer over the ranks of parallel.tensor"
    )
    tensor_across_hosts: Literal["warn", "never"] = changeable(
        "warn", "if a tensor-parallel group spans several hosts: warn, or refuse to start"
    )
    optimizer_shard: Literal["none", "state", "gradients"] = changeable(
        "none",
        "sharded optimizer: each replica stores and updates its shard; state: of the optimizer state (ZeRO-1); "
        "gradients: also of the gradients (ZeRO-2), which are then reduced after every micro-batch",
    )
    micro_batches: int = changeable(1, "number of micro-batches that a batch is split into, at most", ge=1)
    schedule: Literal["gpipe", "1f1b", "zero_bubble"] = changeable(
        "1f1b",
        "pipeline schedule; gpipe: all forwards first; 1f1b: one forward, one backward, which stores fewer "
        "activations; zero_bubble: 1f1b that computes weight gradients when a stage would otherwise wait",
    )
    partition: str | list[int] = changeable(
        "auto",
        "layers per stage; auto: the fastest partition by measured layer times; uniform; a list such as [5, 4, 5]; or "
        "package.module:function, which maps a layer's name to its stage",
        allowed="auto, uniform, a list of layers per stage such as [5, 4, 5], or package.module:function",
    )
    recompute: Literal["never", "always", "except_last"] = changeable(
        "never",
        "activation checkpointing: recompute a block's activations in backward; always: for every micro-batch; "
        "except_last: for all but the last",
    )


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    name: Literal["sgd", "adam", "adamw", "muon"] = fixed(
        "adamw",
        "optimizer; muon orthogonalises the updates of the hidden layers' matrices; adamw updates the other weights",
    )
    lr: float = fixed(1e-3, "peak learning rate for one data-parallel replica", gt=0)
    lr_scaling: Literal["linear", "sqrt", "none"] = fixed(
        "linear",
        "scaling of the learning rate with the number of replicas dp: lr x dp, lr x sqrt(dp), or lr; with "
        "training.global_batch_size, global_batch_size / batch_size replaces dp",
    )
    weight_decay: float = fixed(0.01, "weight decay; not applied to biases, norms and embeddings", ge=0)
    momentum: float = fixed(0.0, "momentum, for sgd", ge=0, lt=1)
    betas: tuple[Beta, Beta] = fixed(
        (0.9, 0.95),
        "decay rates of adam and adamw, and of muon's adamw",
        allowed="a list of two numbers from 0 to less than 1, such as [0.9, 0.95]",
    )
    eps: float = fixed(1e-8, "epsilon of adam and adamw, and of muon's adamw", gt=0)
    clip_norm: OptionalPositive = fixed(1.0, "gradient clipping: maximum norm of the whole gradient; none: no clipping")
    ema: OptionalDecay = fixed(
        None,
        "decay of an exponential moving average of the weights, such as 0.999, which is evaluated and saved for use "
        "while training goes on with the raw weights; none: no average",
    )
    schedule: Literal["constant", "step", "cosine", "linear", "wsd", "noam"] = fixed(
        "cosine",
        "learning rate after warm-up; constant; step: x gamma every step_epochs epochs; cosine: decays to lr x gamma "
        "at the end; "
        "linear: decays to zero at the end; wsd (warm-up, stable, decay): constant, then decays to zero over the last "
        "decay_fraction of the steps; noam: proportional to the inverse square root of the step",
    )
    warmup_steps: int = fixed(0, "number of steps of linear warm-up from zero", ge=0)
    decay_fraction: float = fixed(0.2, "fraction of the steps over which the wsd schedule decays", gt=0, le=1)
    gamma: float = fixed(0.1, "factor of the step and cosine schedules", ge=0, le=1)
    step_epochs: int = fixed(1, "epochs between two decays of the step schedule", ge=1)


class TrainingConfig(Section):
    """Length, batch size, precision and evaluation."""

    epochs: int = changeable(1, "number of passes over the training split", ge=1)
    max_steps: OptionalCount = changeable(None, "stop after this many steps; none: after `epochs`")
    batch_size: int = changeable(8, "samples per replica and accumulation step", ge=1)
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
        "steps as its part needs; none: batch_size x accumulation x replicas",
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
        "validation metric that selects the best checkpoint: loss, perplexity, accuracy, f1, bleu, …; with a leading "
        "minus: lower is better",
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
        "torch.compile. Where that cannot be, one line says why, and training goes on without",
    )


class TranslationConfig(Section):
    """Beam search, in evaluation and in `translate`."""

    beam: int = changeable(4, "beam size; 1: greedy search", ge=1)
    length_penalty: float = changeable(
        0.6, "length penalty; above 0 favours longer translations (Wu et al. 2016)", ge=0, le=10
    )


class CommunicationConfig(Section):
    """Gradient communication over Horovod."""

    bucket_mb: float = changeable(8.0, "size of a flat gradient bucket in MiB; each bucket is one allreduce", gt=0)
    compression: Literal["none", "auto", "fp16", "fp16_fp32_sum", "int8", "int4", "powersgd"] = changeable(
        "none",
        "compression of gradients in transit; fp16: half the bytes, summed by Horovod in fp16, which rounds once per "
        "replica; fp16_fp32_sum: the same bytes, summed in fp32; int8: a quarter; int4: an eighth; powersgd: factors "
        "of low rank, which learn more slowly; auto: none, fp16, int8 or int4, whichever suits the link",
    )
    powersgd_rank: int = changeable(4, "rank of the factors of compression=powersgd", ge=1)
    overlap: bool = changeable(True, "send each bucket as soon as it is full, while backward continues")
    embedding_rows: Literal["auto", "always", "never"] = changeable(
        "auto",
        "send the gradient of an embedding as one row per token instead of a matrix of the vocabulary's size; "
        "auto: if a step has fewer tokens than the vocabulary",
    )
    local_steps: int = fixed(
        1,
        "steps that each replica takes on its own before its weights and those of the others are averaged (DiLoCo), "
        "after optimizer.warmup_steps; not the same mathematics, and lr is not scaled with the replicas; 1: all "
        "replicas average every gradient",
        ge=1,
    )
    outer_lr: float = fixed(0.7, "learning rate of the averaged weights, for local_steps", gt=0)
    outer_momentum: float = fixed(0.9, "Nesterov momentum of the averaged weights, for local_steps", ge=0, lt=1)


class CheckpointConfig(Section):
    """When checkpoints are saved, which ones are kept, and where a run resumes."""

    every_steps: OptionalCount = changeable(
        200, "steps between two checkpoints; none: only by every_seconds and at the end"
    )
    every_epochs: OptionalCount = changeable(None, "epochs between two checkpoints, in addition to every_steps")
    every_seconds: OptionalPositive = changeable(None, "seconds between two checkpoints, in addition to every_steps")
    keep_last: int = changeable(3, "number of newest checkpoints to keep", ge=1)
    keep_best: bool = changeable(True, "keep the best checkpoint by training.best_metric, and test it at the end")
    resume: str = changeable(
        "auto",
        "auto: resume from the newest complete checkpoint in output_dir; never: refuse an output_dir that has one; "
        "or the checkpoint (or run directory) to start from",
    )


class Config(Section):
    """The configuration of a job."""

    task: str = fixed(
        "language_model",
        "task to train: language_model, translation, classification, or your own package.module:Class",
        allowed="'language_model', 'translation', 'classification' or package.module:Class",
        pattern=r"^(language_model|translation|classification|[\w.]+:\w+)$",
    )
    output_dir: str = changeable("runs/default", "run directory", min_length=1)
    profile: bool = changeable(
        False, "write timeline-NNN.json, a Chrome trace per rank, of steps 3 to 7 after this start"
    )
    tracking: list[Literal["wandb", "mlflow", "trackio"]] = changeable(
        [],
        "experiment trackers that get the configuration, the metrics and the summary: a list of wandb, mlflow and "
        "trackio; their keys come from the environment or their own login",
        allowed="a list of wandb, mlflow and trackio, such as [wandb, mlflow]",
    )
    tracking_project: OptionalName = changeable(
        None,
        "project (MLflow: experiment) in the trackers; none: WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME or TRACKIO_PROJECT, "
        "otherwise hvd-transformer",
    )
    seed: int = fixed(1, "random seed of the weights, the data order and dropout", ge=0, lt=2**63)
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
    """The schema's entry for a dotted key."""
    section, _, name = key.rpartition(".")
    model = Config.model_fields[section].annotation if section else Config
    assert isinstance(model, type) and issubclass(model, Section)
    return model.model_fields[name]


def may_change(key: str) -> bool:
    """Tell whether a run may resume from a checkpoint that has another value for this dotted key."""
    return bool(_extra(key)["may_change"])


def allowed(key: str) -> str | None:
    """What the value of this dotted key may be, in words; None if its type and limits say it."""
    found: str | None = _extra(key)["allowed"]
    return found


def built_in(pattern: str) -> list[str]:
    """The words among the alternatives of a key's pattern, such as the built-in tasks."""
    return [word for word in pattern.removeprefix("^(").removesuffix(")$").split("|") if word.isidentifier()]


def _extra(key: str) -> dict[str, Any]:
    extra = field(key).json_schema_extra
    assert isinstance(extra, dict)
    return extra
