"""Every key is documented and says whether it may change when a run resumes."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from hvd_transformer.config import Config
from hvd_transformer.config.schema import KEYS, SECTIONS, flatten, may_change

# The keys that DESIGN.md names, as far as this version has what they are for.
DESIGNED = """
task output_dir seed model.num_layers model.d_model model.num_heads model.d_feedforward model.dropout
model.max_length model.norm model.activation model.position model.tie_embeddings data.source data.tokenizer
data.vocab_size data.min_frequency data.batching data.sequence_length data.cache_dir parallel.pipeline
parallel.micro_batches optimizer.name optimizer.lr optimizer.lr_scaling optimizer.weight_decay optimizer.clip_norm
optimizer.schedule optimizer.warmup_steps optimizer.gamma training.epochs training.max_steps training.batch_size
training.accumulation training.precision training.device training.log_every training.eval_every training.compile
communication.bucket_mb communication.compression communication.overlap checkpoint.every_steps
checkpoint.every_seconds checkpoint.keep_last checkpoint.keep_best checkpoint.resume
translation.beam translation.length_penalty training.best_metric data.text_column data.label_column
"""

# Keys that affect the weights, the tokens or the updates; the others only affect speed, length and place.
FIXED = """
task seed model.pretrained model.num_layers model.d_model model.num_heads model.d_feedforward model.dropout
model.max_length model.norm model.activation model.position model.tie_embeddings data.source data.split data.tokenizer
data.vocab_size data.min_frequency data.tokenizer_sample_mb data.batching data.sequence_length
model.num_decoder_layers model.share_embeddings data.too_long data.source_language data.target_language data.train
data.valid data.test data.text_column data.label_column data.positive_label data.class_weights
training.label_smoothing optimizer.name optimizer.lr optimizer.lr_scaling optimizer.weight_decay optimizer.momentum
optimizer.betas optimizer.eps optimizer.clip_norm optimizer.schedule optimizer.warmup_steps optimizer.gamma
model.vocab_size model.num_kv_heads model.head_width model.norm_type model.norm_eps model.qk_norm model.bias
model.head_bias model.scale_embedding model.rope_theta model.rope_scaling
model.init_output optimizer.ema optimizer.decay_fraction training.precision
communication.local_steps communication.outer_lr communication.outer_momentum optimizer.step_epochs
data.sources data.document_mask
data.target_length model.init
model.lora_rank model.lora_alpha model.lora_targets data.messages_column
"""


def test_the_designed_keys_are_there() -> None:
    assert set(DESIGNED.split()) <= set(KEYS)
    assert set(SECTIONS) == {key.split(".")[0] for key in DESIGNED.split() if "." in key}


def test_exactly_the_keys_of_speed_length_and_place_may_change() -> None:
    assert [key for key in KEYS if not may_change(key)] == [key for key in KEYS if key in FIXED.split()]
    assert set(FIXED.split()) <= set(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_has_a_description_and_a_valid_default(key: str) -> None:
    section, _, name = key.rpartition(".")
    owner = Config.model_fields[section].annotation if section else Config
    field = owner.model_fields[name]
    assert field.description and not field.description.endswith(".")
    # Defaults are not validated when they are used: check them here.
    value = field.get_default()
    assert owner.model_validate({name: value}).model_dump()[name] == value


def test_flatten_keeps_every_value_once() -> None:
    config = Config.model_validate({"seed": 7, "model": {"num_layers": 3}})
    flat = flatten(config)
    assert flat["seed"] == 7 and flat["model.num_layers"] == 3
    assert tuple(flat) == KEYS and len(set(KEYS)) == len(KEYS)


def test_a_configuration_cannot_be_changed_by_accident() -> None:
    with pytest.raises(ValidationError):
        Config().model.num_layers = 5


def test_the_configuration_imports_neither_torch_nor_numpy() -> None:
    program = "import hvd_transformer.config, sys; print(sorted({'torch', 'numpy', 'horovod'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
