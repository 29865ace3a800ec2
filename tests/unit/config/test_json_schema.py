"""The JSON schema of configuration files accepts what `load` accepts and marks what it refuses."""

import json
from typing import Any, get_args

import pytest
import yaml
from jsonschema import Draft7Validator

from hvd_transformer.config import Config, check_words, dump, load
from hvd_transformer.config.json_schema import json_schema
from hvd_transformer.config.load import PRESETS, preset_names
from hvd_transformer.config.schema import KEYS, SECTIONS, field, flatten
from hvd_transformer.errors import UserError

SCHEMA = json_schema()
VALIDATOR = Draft7Validator(SCHEMA)


def valid(text: str) -> bool:
    """Whether a file with this text satisfies the schema, as an editor tells."""
    return VALIDATOR.is_valid(json.loads(json.dumps(yaml.safe_load(text))))  # the keys of JSON are text


def entry(key: str) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    properties = SCHEMA["properties"]
    return (properties[section]["properties"] if section else properties)[name]


def accepted(text: str, tmp_path: Any) -> bool:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    try:
        load(file=file)
    except UserError:
        return False
    return True


def test_it_is_a_schema() -> None:
    Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_satisfies_it_as_it_is_and_complete(name: str) -> None:
    assert valid((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"))
    assert valid(dump(load(name)))


GOOD = """
optimizer: {clip_norm: none}
optimizer: {clip_norm: None}
optimizer: {clip_norm: null}
optimizer: {clip_norm: "NULL"}
optimizer: {lr: 1e-3}
optimizer: {betas: [0.9, 1e-1]}
optimizer.lr: 0.5
model.num_layers: 3
model: {head_bias: none}
model: {head_bias: false}
model: {position: rotary, rope_scaling: {rope_type: linear, factor: 2}}
{task: classification, data: {class_weights: balanced}}
{task: classification, data: {class_weights: {0: 1, 1: 2.5}}}
{task: classification, data: {class_weights: none, positive_label: 1}}
data: {source: 7}
data: {tokenizer_sample_mb: none}
data: {sources: [{source: a.jsonl, weight: 0.7}, {source: b.jsonl, weight: 1e-1, epochs: 2}]}
data: {sources: none, document_mask: true}
parallel: {pipeline: 2, partition: [1, 3]}
communication: {compression: none}
training: {max_steps: 5, eval_every: none}
checkpoint: {every_steps: ~}
task: my_package.tasks:Mine
"""
BAD = """
nonsense: 1
optimiser: {lr: 1}
model.nonsense: 1
models.num_layers: 1
model: {num_layer: 2}
model: 3
model: []
model:
model: {num_layers: 0}
model: {num_layers: 2.5}
model: {num_layers: none}
model: {num_layers: four}
model: {dropout: 1}
model: {norm: middle}
model: {bias: maybe}
model: {rope_scaling: linear}
model.dropout: -0.1
seed: -1
seed: 9223372036854775808
task: cooking
output_dir: ""
data: {split: [1]}
data: {split: [0.5, 0.2, 0.2, 0.1]}
data: {split: [0.9, 1.1]}
data: {source: true}
data: {sources: a.jsonl}
data: {sources: [a.jsonl]}
data: {sources: []}
data: {batching: null}
data: {class_weights: {good: 0}}
data: {class_weights: even}
optimizer: {lr: 0}
optimizer: {lr: hot}
optimizer: {clip_norm: 0}
optimizer: {clip_norm: no}
optimizer: {clip_norm: nothing}
optimizer: {betas: [0.9]}
optimizer: {betas: [0.9, 1.0]}
optimizer: {ema: 1}
training: {max_steps: 0}
training: {precision: int8}
training: {text_samples: 11}
parallel: {partition: [1, x]}
communication: {compression: zip}
communication: {overlap: 2}
checkpoint: {keep_last: [1]}
"""


@pytest.mark.parametrize("text", GOOD.strip().splitlines())
def test_a_file_that_is_loaded_satisfies_it(text: str, tmp_path: Any) -> None:
    assert accepted(text, tmp_path)
    assert valid(text)


@pytest.mark.parametrize("text", BAD.strip().splitlines())
def test_a_file_that_is_refused_does_not(text: str, tmp_path: Any) -> None:
    assert not accepted(text, tmp_path)
    assert not valid(text)


VALUES = ["0", "1", "-1", "2", "0.5", "1.5", "1e-3", "none", "None", "word", "", "[]", "[1, 2]", "[0.5, 0.5]", "{a: 1}"]
# The range of 1e-3, which is text, cannot be checked; a number is no tokenizer, although 0.5 could be a file's name.
EXCEPTIONS = {("model.rope_theta", "1e-3"), ("data.tokenizer", "0.5"), ("data.tokenizer", "1.5")}


@pytest.mark.parametrize("key", KEYS)
def test_it_agrees_with_the_typed_schema_on_each_value(key: str) -> None:
    """But for switches, which also have words and numbers on a command line."""
    values = ["true", "false"] if bool in (field(key).annotation, *get_args(field(key).annotation)) else VALUES
    for value in values:
        if (key, value) in EXCEPTIONS:
            continue
        try:
            check_words([f"{key}={value}"])
            allowed = True
        except UserError:
            allowed = False
        text = f"{key}: {value or repr('')}"
        assert valid(text) == allowed, text
        section, _, name = text.partition(": ")[0].rpartition(".")
        if section:
            assert valid(f"{section}: {{{name}: {value or repr('')}}}") == allowed, text


def test_every_key_is_explained_and_has_its_default_and_its_choices() -> None:
    defaults = flatten(Config())
    for key in KEYS:
        found = entry(key)
        assert found["description"].startswith(field(key).description)
        assert found["default"] == defaults[key]
        assert VALIDATOR.evolve(schema=found).is_valid(found["default"])
    assert {"enum": ["language_model", "translation", "classification"]} in entry("task")["anyOf"]
    assert entry("optimizer.name")["enum"] == ["sgd", "adam", "adamw", "muon"]
    assert "linear, llama3 or yarn" in entry("model.rope_scaling")["description"]
    assert {"enum": ["none", None]} in entry("training.max_steps")["anyOf"]
    assert (entry("model.dropout")["minimum"], entry("model.dropout")["exclusiveMaximum"]) == (0, 1)


def test_editors_are_offered_keys_once_and_need_no_references() -> None:
    """Dotted keys are allowed and not offered; only these refer to others."""
    assert set(SCHEMA["properties"]) == {key.partition(".")[0] for key in KEYS}
    for section in SECTIONS:
        assert "$ref" not in json.dumps(SCHEMA["properties"][section])
    assert "may_change" not in json.dumps(SCHEMA)
