"""Checks across keys: settings that do not fit together."""

import math

from hvd_transformer.config.fine_tuning_checks import check_fine_tuning
from hvd_transformer.config.mixture import check_mixture
from hvd_transformer.config.schema import LEARNED_TOKENIZERS, Config, ModelConfig, OptimizerConfig, allowed, shown
from hvd_transformer.errors import UserError


def check(config: Config) -> None:
    """Raise `UserError`, which names the keys that do not fit together and what is allowed."""
    model, data, optimizer, training = config.model, config.data, config.optimizer, config.training
    check_fine_tuning(config)
    _check_heads(model)
    if model.position == "sinusoidal" and model.d_model % 2:
        raise UserError(f"model.position=sinusoidal: needs an even model.d_model, not {model.d_model}")
    _check_rope(model)
    if model.in_own_blocks:
        _check_lengths(config)
    if model.vocab_size is not None and config.task in ("translation", "classification"):
        raise UserError(f"model.vocab_size={model.vocab_size}: not with task={config.task}; leave it at none")
    _check_translation_keys(config)
    _check_data_keys(config)
    if sum(data.split) > 1 + 1e-9 or data.split[0] <= 0:
        raise UserError(f"data.split={data.split}: the fractions must add up to at most 1, and train's must be above 0")
    least = 256 + (1 if config.task == "language_model" else 4)  # running text has only <unk> besides the bytes
    if data.tokenizer == "bpe" and data.vocab_size is not None and data.vocab_size < least:
        raise UserError(
            f"data.vocab_size={data.vocab_size}: data.tokenizer=bpe needs at least {least} (256 bytes and the special "
            "tokens)"
        )
    if data.vocab_size == 1:
        raise UserError("data.vocab_size=1: must be at least 2; with a single token there is nothing to predict")
    if optimizer.schedule == "noam" and optimizer.warmup_steps == 0:
        raise UserError("optimizer.schedule=noam: needs optimizer.warmup_steps of at least 1")
    _check_without_effect(optimizer)
    _check_tensor(config)
    if config.parallel.optimizer_shard == "gradients" and config.parallel.schedule == "zero_bubble":
        raise UserError(
            "parallel.optimizer_shard=gradients: not with parallel.schedule=zero_bubble, which defers the weight "
            "gradients; use 1f1b, or optimizer_shard=state"
        )
    partition = config.parallel.partition
    if isinstance(partition, str) and partition not in ("auto", "uniform") and ":" not in partition:
        raise UserError(f"parallel.partition={partition}: must be {allowed('parallel.partition')}")
    size = training.global_batch_size if training.batch_size == "auto" else training.batch_size
    if size is not None and config.parallel.micro_batches > size and data.batch_tokens is None:
        raise UserError(
            f"parallel.micro_batches={config.parallel.micro_batches}: more than the "
            f"training.{'global_' if training.batch_size == 'auto' else ''}batch_size={size} samples that they divide"
        )
    if len(set(config.tracking)) < len(config.tracking):
        raise UserError(f"tracking=[{', '.join(config.tracking)}]: name each tracker once")
    _check_global_batch_size(config)
    _check_local_steps(config)
    if training.text_samples and config.task == "classification":
        raise UserError(
            f"training.text_samples={training.text_samples}: not with task=classification, which writes no text; leave "
            "it at 0"
        )
    if config.communication.compression != "none" and training.precision == "fp64":
        raise UserError(
            f"communication.compression={config.communication.compression}: not with training.precision=fp64"
        )
    _check_powersgd(config)


def _check_translation_keys(config: Config) -> None:
    """Refuse what only an encoder-decoder has."""
    if config.task not in ("language_model", "classification"):
        return
    for key in ("num_decoder_layers", "share_embeddings"):
        value, default = getattr(config.model, key), type(config.model).model_fields[key].default
        if value != default:
            raise UserError(
                f"model.{key}={shown(value)}: only with task=translation, not task={config.task}; leave it at "
                f"{shown(default)}"
            )


def _check_lengths(config: Config) -> None:
    data, most = config.data, config.model.max_length
    ends = int(config.task == "translation")  # a target also has a start token
    lengths = {"sequence_length": data.sequence_length + (0 if data.target_length else ends)}
    if data.target_length:
        lengths["target_length"] = data.target_length + ends
    for key, length in lengths.items():
        if length > most:
            raise UserError(
                f"data.{key}={getattr(data, key)}: longer than the model's positions, model.max_length={most}"
                + (" minus one for the target's start token" if length > getattr(data, key) else "")
            )


def _check_heads(model: ModelConfig) -> None:
    if model.head_width is None and model.d_model % model.num_heads:
        raise UserError(
            f"model.d_model={model.d_model}: must be a multiple of model.num_heads={model.num_heads}, unless "
            "model.head_width is given"
        )
    if model.num_kv_heads is not None and model.num_heads % model.num_kv_heads:
        raise UserError(f"model.num_kv_heads={model.num_kv_heads}: must divide model.num_heads={model.num_heads}")
    width = model.head_width or model.d_model // model.num_heads
    if model.position == "rotary" and width % 2:
        given = (
            f"model.head_width={width}"
            if model.head_width
            else (f"model.d_model={model.d_model} / model.num_heads={model.num_heads}")
        )
        raise UserError(f"model.position=rotary: needs an even width per head, but {given} is odd")


# The keys of model.rope_scaling by its rope_type: those that must be there, and those that may.
_ROPE_KEYS = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (("factor", "original_max_position_embeddings"), ("beta_fast", "beta_slow", "attention_factor")),
}


def _check_rope(model: ModelConfig) -> None:
    default = type(model).model_fields["rope_theta"].default
    if model.position != "rotary":
        if model.rope_theta != default:
            raise UserError(
                f"model.rope_theta={model.rope_theta}: only with model.position=rotary; leave it at {default}"
            )
        if model.rope_scaling is not None:
            raise UserError("model.rope_scaling: only with model.position=rotary; leave it at none")
    if model.rope_scaling is None:
        return
    scaling = dict(model.rope_scaling)
    kind = scaling.pop("rope_type", None)
    if kind not in _ROPE_KEYS:
        raise UserError(f"model.rope_scaling: rope_type={kind}: must be one of {', '.join(_ROPE_KEYS)}")
    needed, possible = _ROPE_KEYS[str(kind)]
    for key in needed:
        if key not in scaling:
            raise UserError(f"model.rope_scaling: rope_type={kind} needs {key}")
    for key, value in scaling.items():
        if key not in (*needed, *possible):
            raise UserError(
                f"model.rope_scaling: {key}: not with rope_type={kind}, which has {', '.join((*needed, *possible))}"
            )
        if isinstance(value, str) or not 0 < value < math.inf:
            raise UserError(f"model.rope_scaling: {key}={value}: must be a number above 0")
        if key == "original_max_position_embeddings" and value % 1:
            raise UserError(f"model.rope_scaling: {key}={value}: must be a whole number")
    if kind == "llama3" and float(scaling["high_freq_factor"]) <= float(scaling["low_freq_factor"]):
        raise UserError("model.rope_scaling: high_freq_factor must be above low_freq_factor")


def _check_powersgd(config: Config) -> None:
    compression, rank = config.communication.compression, config.communication.powersgd_rank
    if compression == "powersgd" and config.parallel.optimizer_shard != "none":
        raise UserError(
            "communication.compression=powersgd: not with parallel.optimizer_shard="
            f"{config.parallel.optimizer_shard}, which reduces gradients to shards; use int8 or int4"
        )
    default = type(config.communication).model_fields["powersgd_rank"].default
    if compression != "powersgd" and rank != default:
        raise UserError(
            f"communication.powersgd_rank={rank}: only with communication.compression=powersgd; leave it at {default}"
        )


# The keys of `data` that only some of the built-in tasks use.
_BUILT_IN = ("language_model", "translation", "classification")
_TASKS_OF_KEY = {
    "batching": ("language_model",),
    "sources": ("language_model",),
    "document_mask": ("language_model",),
    "target_length": ("translation",),
    "too_long": ("translation", "classification", "data.messages_column"),
    "batch_tokens": ("translation", "classification", "data.messages_column"),
    "source_language": ("translation",),
    "target_language": ("translation",),
    "text_column": ("classification", "language_model"),
    "messages_column": ("language_model",),
    "label_column": ("classification",),
    "positive_label": ("classification",),
    "class_weights": ("classification",),
}


def _check_data_keys(config: Config) -> None:
    """Refuse values without effect. A task of one's own may use every key."""
    data = config.data
    here = {config.task} if data.messages_column is None else {config.task, "data.messages_column"}
    for key, tasks in _TASKS_OF_KEY.items():
        value, default = getattr(data, key), type(data).model_fields[key].default
        if value != default and config.task in _BUILT_IN and here.isdisjoint(tasks):
            allowed_tasks = " or ".join(task if "." in task else f"task={task}" for task in tasks)
            raise UserError(
                f"data.{key}={value}: not with task={config.task}, only with {allowed_tasks}; leave it at "
                f"{shown(default)}"
            )
    check_mixture(data)
    if data.document_mask and data.batching == "columns":
        raise UserError(
            "data.document_mask=true: not with data.batching=columns, whose columns continue across steps; use windows"
        )
    _check_tokenizer(config)
    sample, default = data.tokenizer_sample_mb, type(data).model_fields["tokenizer_sample_mb"].default
    if sample != default and data.tokenizer != "bpe" and config.task in _BUILT_IN:
        raise UserError(
            f"data.tokenizer_sample_mb={shown(sample)}: only with data.tokenizer=bpe; "
            f"data.tokenizer={data.tokenizer} "
            + ("counts the whole training split" if data.tokenizer in LEARNED_TOKENIZERS else "is not learned")
        )


def _check_tokenizer(config: Config) -> None:
    data = config.data
    given = f"data.tokenizer={data.tokenizer}"
    if data.tokenizer in LEARNED_TOKENIZERS:
        return
    if config.task in ("translation", "classification"):
        raise UserError(f"{given}: a Hugging Face tokenizer only with task=language_model, not task={config.task}")
    for key in ("vocab_size", "min_frequency"):
        value, default = getattr(data, key), type(data).model_fields[key].default
        if value != default:
            raise UserError(
                f"data.{key}={value}: not with {given}, whose vocabulary is fixed; leave it at {shown(default)}"
            )


_WITH_ADAM = ("adam", "adamw", "muon")


def _check_without_effect(optimizer: OptimizerConfig) -> None:
    """Refuse a key of another optimizer or schedule, unless it has its default."""
    of_name = {"momentum": ("sgd",), "betas": _WITH_ADAM, "eps": _WITH_ADAM}
    of_schedule = {"gamma": ("step", "cosine"), "step_epochs": ("step",), "decay_fraction": ("wsd",)}
    for other, fitting in (("name", of_name), ("schedule", of_schedule)):
        chosen = getattr(optimizer, other)
        for key, choices in fitting.items():
            value, default = getattr(optimizer, key), OptimizerConfig.model_fields[key].default
            if chosen not in choices and value != default:
                raise UserError(
                    f"optimizer.{key}={shown(value)}: only with optimizer.{other}={' or '.join(choices)}; with "
                    f"{chosen} leave it at {shown(default)}"
                )


def _check_tensor(config: Config) -> None:
    model, tensor = config.model, config.parallel.tensor
    for key, value in (
        ("num_heads", model.num_heads),
        ("num_kv_heads", model.num_kv_heads or model.num_heads),
        ("d_feedforward", model.d_feedforward),
    ):
        if value % tensor:
            raise UserError(f"parallel.tensor={tensor}: must divide model.{key}={value}")
    if tensor == 1 and config.parallel.vocab_parallel:
        raise UserError("parallel.vocab_parallel=true: needs parallel.tensor of at least 2")


def _check_local_steps(config: Config) -> None:
    communication, shard = config.communication, config.parallel.optimizer_shard
    given = f"communication.local_steps={communication.local_steps}"
    if communication.local_steps == 1:
        for key in ("outer_lr", "outer_momentum"):
            value, default = getattr(communication, key), type(communication).model_fields[key].default
            if value != default:
                raise UserError(
                    f"communication.{key}={value}: only with communication.local_steps of at least 2; leave it at "
                    f"{default}"
                )
    elif shard != "none":
        raise UserError(
            f"{given}: not with parallel.optimizer_shard={shard}, since each replica needs an optimizer state of its "
            "own; use optimizer_shard=none"
        )
    elif communication.compression != "none":
        raise UserError(
            f"{given}: not with communication.compression={communication.compression}, since local steps send no "
            "gradients; use compression=none"
        )
    elif config.optimizer.ema is not None:
        raise UserError(
            f"{given}: not with optimizer.ema={config.optimizer.ema}, since the weights of the replicas differ; "
            "use ema=none"
        )


def _check_global_batch_size(config: Config) -> None:
    training = config.training
    size, total = training.batch_size, training.global_batch_size
    if size == "auto":
        _check_found_batch_size(config)
    if total is None:
        return
    if training.accumulation != 1:
        raise UserError(
            f"training.accumulation={training.accumulation}: not with training.global_batch_size={total}, which "
            "determines the number of accumulation steps; set only one of the two"
        )
    if size == "auto":
        return
    if size > total:
        raise UserError(f"training.batch_size={size}: more than the training.global_batch_size={total} of a whole step")
    if config.data.batching == "columns" and total % size:
        raise UserError(
            f"training.global_batch_size={total}: with data.batching=columns it must be a multiple of "
            f"training.batch_size={size}, the number of columns"
        )


def _check_found_batch_size(config: Config) -> None:
    """Refuse settings with which the result would depend on the batch size that is found."""
    training, data, given = config.training, config.data, "training.batch_size=auto"
    if training.global_batch_size is None:
        raise UserError(f"{given}: needs training.global_batch_size, the samples per step whatever is found")
    if config.optimizer.lr_scaling != "none":
        raise UserError(
            f"{given}: needs optimizer.lr_scaling=none, since with {config.optimizer.lr_scaling} the learning rate "
            "would depend on what is found"
        )
    if data.batching == "columns":
        raise UserError(f"{given}: not with data.batching=columns, whose number of columns it is; give a number")
    if data.batch_tokens is not None:
        raise UserError(f"{given}: not with data.batch_tokens={data.batch_tokens}, which limits a batch; give a number")
    if training.eval_batches is not None and training.eval_batch_size is None:
        raise UserError(
            f"{given}: needs training.eval_batch_size beside training.eval_batches={training.eval_batches}, so that "
            "the same samples are evaluated whatever is found"
        )
