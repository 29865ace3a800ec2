"""Settings are merged in a fixed order; an invalid one gives an error with key, place and what is allowed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_transformer.config import Config, dump, load, load_again
from hvd_transformer.config.load import PRESETS, preset_names, preset_summary
from hvd_transformer.config.schema import KEYS, SECTIONS, flatten
from hvd_transformer.config.sections.key import LARGEST
from hvd_transformer.errors import UserError

PRESET_NAMES = [
    "chnsenticorp", "gpt-small", "llama-1b", "llama-tiny", "multi30k", "python-docs", "shakespeare-char", "tiny",
    "tutorial-1b", "tutorial-small",
]  # fmt: skip
DEFAULTS = flatten(Config())


def refused(*overrides: str, preset: str | None = None, file: Path | None = None) -> str:
    """The one line that the user sees."""
    with pytest.raises(UserError) as caught:
        load(preset, file, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def written(folder: Path, text: str | bytes, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("with_key", [False, True])
@pytest.mark.parametrize("with_file", [False, True])
@pytest.mark.parametrize("with_preset", [False, True])
def test_a_key_beats_the_file_the_preset_and_the_default(
    tmp_path: Path, with_preset: bool, with_file: bool, with_key: bool
) -> None:
    file = written(tmp_path, "model: {num_layers: 7}\n")
    config = load(
        "tutorial-small" if with_preset else None,
        file if with_file else None,
        ["model.num_layers=9"] if with_key else [],
    )
    levels = [(True, 4), (with_preset, 2), (with_file, 7), (with_key, 9)]
    assert config.model.num_layers == [value for present, value in levels if present][-1]
    # What only the preset sets stays as it sets it.
    assert config.model.norm == ("post" if with_preset else "pre")


def test_the_last_of_two_equal_keys_counts() -> None:
    assert load(overrides=["seed=5", "seed=6"]).seed == 6


def test_the_presets() -> None:
    assert preset_names() == PRESET_NAMES


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_a_preset_says_what_its_file_says_and_leaves_the_rest_at_the_default(name: str) -> None:
    content = yaml.safe_load((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"))
    expected = dict(DEFAULTS)
    for section, value in content.items():
        inner = value if isinstance(value, dict) else {None: value}
        expected.update({f"{section}.{key}" if key else section: item for key, item in inner.items()})
    assert flatten(load(name)) == expected
    assert preset_summary(name).endswith(".") and not preset_summary(name).startswith("#")


def test_the_tutorial_preset_has_the_tutorials_settings() -> None:
    config = flatten(load("tutorial-1b"))
    tutorial = {
        "model.d_model": 4096,
        "model.d_feedforward": 4096,
        "model.num_heads": 16,
        "model.num_layers": 8,
        "model.dropout": 0.2,
        "model.norm": "post",
        "model.activation": "relu",
        "model.init": "tutorial",
        "optimizer.name": "sgd",
        "optimizer.lr": 5.0,
        "optimizer.schedule": "step",
        "optimizer.gamma": 0.95,
        "optimizer.clip_norm": 0.5,
        "training.batch_size": 20,
        "training.eval_batch_size": 10,
        "data.sequence_length": 35,
        "data.batching": "columns",
        "data.tokenizer": "basic_english",
        "parallel.pipeline": 2,
        "parallel.micro_batches": 8,
    }
    assert {key: config[key] for key in tutorial} == tutorial
    assert "mask" in (PRESETS / "tutorial-1b.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [None, *PRESET_NAMES])
def test_a_dumped_configuration_loads_again(tmp_path: Path, name: str | None) -> None:
    config = load(name)
    assert load(file=written(tmp_path, dump(config))) == config


# "~name" is the home of a user, whom this machine may not know.
words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(lambda word: word[0] != "~")


@settings(deadline=None, max_examples=80)
@given(
    source=st.one_of(words, st.sampled_from(["no", "null", "~", "1e3", "- a", "a: b", "# c", "'", '"', "0x10", "{}"])),
    output=words,
    rate=st.floats(1e-300, 1e300),
    vocab_size=st.one_of(st.none(), st.integers(257, LARGEST)),
    clip_norm=st.one_of(st.none(), st.floats(1e-300, 1e300)),
    betas=st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True)),
    compiled=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_configuration_survives_dump_and_load(
    tmp_path_factory: pytest.TempPathFactory,
    source: str,
    output: str,
    rate: float,
    vocab_size: int | None,
    clip_norm: float | None,
    betas: tuple[float, float],
    compiled: bool,
    seed: int,
) -> None:
    values: dict[str, Any] = {
        "data.source": source,
        "output_dir": output,
        "optimizer.lr": rate,
        "data.vocab_size": vocab_size,
        "optimizer.clip_norm": clip_norm,
        "optimizer.betas": list(betas),
        "training.compile": compiled,
        "seed": seed,
    }
    # A path that starts like a list is taken as one on the command line: it can only come from a file.
    from_file = {key: values.pop(key) for key in ("data.source", "output_dir")}
    folder = tmp_path_factory.mktemp("round")
    first = written(folder, yaml.safe_dump({"data": {"source": source}, "output_dir": output}))
    config = load(file=first, overrides=[f"{key}={value}" for key, value in values.items()])
    flat = flatten(config)
    assert {key: flat[key] for key in (*values, *from_file)} == {**values, **from_file}
    assert load(file=written(folder, dump(config), "again.yaml")) == config


def test_none_as_a_word_means_no_limit() -> None:
    config = load("python-docs", overrides=["training.max_steps=none", "data.vocab_size=None"])
    assert config.training.max_steps is None and config.data.vocab_size is None


@pytest.mark.parametrize("key", [key for key in KEYS if len(key.rpartition(".")[2]) > 3])
def test_a_misspelt_key_is_told_the_nearest(key: str) -> None:
    section, dot, leaf = key.rpartition(".")
    for wrong in (
        leaf[:-1],
        leaf[:1] + leaf[2:],
        leaf[:2] + leaf[3:2:-1] + leaf[4:],
        leaf + "x",
        leaf.replace("_", ""),
    ):
        if section + dot + wrong not in KEYS:
            message = refused(f"{section}{dot}{wrong}=1")
            assert message == f"{section}{dot}{wrong} (command line): unknown key, did you mean {key}?"


def test_a_key_without_or_with_the_wrong_section_is_told_the_whole_key() -> None:
    assert refused("num_layers=4").endswith("did you mean model.num_layers?")
    assert refused("training.weight_decay=0").endswith("did you mean optimizer.weight_decay?")
    assert refused("optimizer.l=1").endswith("did you mean optimizer.lr?")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("data.batch_size", "training.batch_size"),
        ("batch_size", "training.batch_size"),
        ("lr_scaling", "optimizer.lr_scaling"),  # not model.rope_scaling
        ("betas", "optimizer.betas"),  # not task
        ("model.precision", "training.precision"),
        ("optimizer.precision", "training.precision"),
        ("model.compile", "training.compile"),
        ("parallel.device", "training.device"),
        ("communication.device", "training.device"),
        ("training.tensor", "parallel.tensor"),
        ("training.seed", "seed"),
        ("cluster.nodes.output_dir", "output_dir"),
        # Two sections have a schedule and a vocab_size.
        ("schedule", "parallel.schedule or optimizer.schedule"),
        ("training.schedule", "parallel.schedule or optimizer.schedule"),
        ("optim.schedule", "optimizer.schedule"),
        ("paralel.schedule", "parallel.schedule"),
        ("date.vocab_size", "data.vocab_size"),
    ],
)
def test_a_key_of_another_section_is_told_before_a_similar_one_of_its_own(wrong: str, right: str) -> None:
    assert refused(f"{wrong}=1") == f"{wrong} (command line): unknown key, did you mean {right}?"


def test_every_key_is_found_from_every_section() -> None:
    for key in KEYS:
        last = key.rpartition(".")[2]
        for wrong in {last, *(f"{section}.{last}" for section in SECTIONS)} - set(KEYS):
            told = refused(f"{wrong}=1").rpartition(", did you mean ")[2].removesuffix("?").split(" or ")
            assert key in told and {other.rpartition(".")[2] for other in told} == {last}


def test_a_section_is_no_key_and_is_told_its_own() -> None:
    message = refused("checkpoint=10")
    assert message.startswith(
        "checkpoint (command line): a section of the configuration; its keys are checkpoint.every"
    )
    assert refused("=1").startswith("=1: not of the form KEY=VALUE")


def test_a_key_like_no_other_gets_no_suggestion() -> None:
    assert refused("xyzzy=1") == "xyzzy (command line): unknown key"


def test_an_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "model:\n  layers: 4\n  num_layer: 4\n")
    assert refused(file=file).startswith(f"model.layers ({file}): unknown key")


def test_an_unknown_preset_is_told_the_nearest_and_all() -> None:
    message = refused(preset="tutorial-1B")
    assert "tutorial-1B" in message and "did you mean tutorial-1b?" in message
    assert all(name in message for name in PRESET_NAMES)


WRONG = [
    ("model.num_layers=x", "a valid integer"),
    ("model.num_layers=2.5", "a valid integer"),
    ("model.num_layers=", "a valid integer"),
    ("model.num_layers=[1]", "a valid integer"),
    ("model.num_layers=none", "a valid integer"),
    ("model.num_layers=0", "greater than or equal to 1"),
    ("model.num_heads=-1", "greater than or equal to 1"),
    ("model.dropout=1", "less than 1"),
    ("model.dropout=-0.1", "greater than or equal to 0"),
    ("model.norm=middle", "'pre' or 'post'"),
    ("model.position=none", "'sinusoidal', 'learned' or 'rotary'"),
    ("model.tie_embeddings=maybe", "true or false"),
    ("data.tokenizer=words", "basic_english, char, bpe, or a Hugging Face tokenizer.json or its folder"),
    ("data.batching=rows", "'windows' or 'columns'"),
    ("data.sequence_length=0", "greater than or equal to 1"),
    ("data.workers=-1", "greater than or equal to 0"),
    ("optimizer.lr=0", "greater than 0"),
    ("optimizer.lr=fast", "a valid number"),
    ("optimizer.lr=nan", "a finite number"),
    ("optimizer.lr=inf", "a finite number"),
    ("optimizer.name=adagrad", "'sgd', 'adam', 'adamw' or 'muon'"),
    ("optimizer.clip_norm=0", "greater than 0"),
    ("optimizer.schedule=linea", "'constant', 'step', 'cosine', 'linear', 'wsd' or 'noam'"),
    ("optimizer.lr_scaling=square", "'linear', 'sqrt' or 'none'"),
    ("training.precision=int8", "'fp32', 'bf16', 'fp16' or 'fp64'"),
    ("training.device=tpu", "'auto', 'cpu' or 'cuda'"),
    ("training.max_steps=0", "greater than or equal to 1, or none"),
    ("training.max_steps=many", "a valid integer, or none"),
    ("training.max_steps=[1]", "a valid integer, or none"),
    ("training.accumulation=nan", "a valid integer"),
    ("training.accumulation=inf", "a valid integer"),
    ("training.accumulation={a: 1}", "a valid integer"),
    ("training.batch_size=most", "a number from 1 to 1000000000000, or auto"),
    ("checkpoint.every_seconds=inf", "a finite number, or none"),
    ("checkpoint.every_seconds=nan", "a finite number, or none"),
    ("optimizer.clip_norm={a: 1}", "a valid number, or none"),
    ("model.tie_embeddings=[0]", "true or false"),
    ("data.source=[a]", "must be text"),
    ("data.test=[a]", "must be text, or none"),
    ("training.deterministic=maybe", "must be true or false"),
    ("training.compile=torch", "must be true or false"),
    ("training.compile={a: 1}", "must be true or false"),
    ("model.head_bias=maybe", "must be true or false, or none"),
    ("communication.bucket_mb=0", "greater than 0"),
    ("communication.compression=zip", "'none', 'auto', 'fp16', 'fp16_fp32_sum', 'int8', 'int4' or 'powersgd'"),
    ("checkpoint.keep_last=0", "greater than or equal to 1"),
    ("checkpoint.every_seconds=-5", "greater than 0"),
    ("translation.length_penalty=1e300", "less than or equal to 10"),
    ("seed=-1", "greater than or equal to 0"),
    (f"seed={2**63}", f"less than {2**63}"),
    ("task=cooking", "'language_model'"),
]


@pytest.mark.parametrize(("word", "allowed"), WRONG, ids=[word for word, _ in WRONG])
def test_a_wrong_value_is_told_with_key_place_and_what_is_allowed(word: str, allowed: str) -> None:
    message = refused(word)
    key, _, value = word.partition("=")
    assert message.startswith(f"{key}={value} (command line): must be ")
    assert allowed in message


# Of values with parts: what is allowed, in one line, whichever part is wrong.
BETAS = "a list of two numbers from 0 to less than 1, such as [0.9, 0.95]"
SPLIT = "a list of two or three fractions from 0 to 1, such as [0.9, 0.05, 0.05]"
WEIGHTS = "balanced, none, or a number above 0 for each label, such as {good: 1, bad: 2.5}"
PARTITION = "auto, uniform, a list of layers per stage such as [5, 4, 5], or package.module:function"
PARTS = {
    "optimizer.betas": (BETAS, "0.9 none [] [0.9] [0.9,0.9,0.9] [a,b] [0.9,[1]] [0.9,nan] [0.9,none] [0.9,1.0] {a:b}"),
    "data.split": (SPLIT, "0.9 none [] [0.9] [0.5,0.2,0.2,0.1] [0.9,x] [0.9,1.1] [0.9,-0.1] [nan,0.5] {train:0.9}"),
    "data.class_weights": (
        WEIGHTS,
        "even [1,2] {good:x} {good:0} {good:-1} {good:nan} {good:inf} {good:[1]} {good:none}",
    ),
    "parallel.partition": (PARTITION, "[1,x] [1,2.5] [1,none] {a:b}"),
}


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [(key, value, wanted) for key, (wanted, values) in PARTS.items() for value in values.split()],
)
def test_a_list_or_table_with_a_wrong_part_is_told_what_it_may_be(key: str, value: str, wanted: str) -> None:
    value = value.replace(",", ", ").replace(":", ": ")
    assert refused(f"{key}={value}") == f"{key}={value} (command line): must be {wanted}"


@pytest.mark.parametrize(
    "key", ["output_dir", "data.source", "data.cache_dir", "checkpoint.resume", "model.pretrained"]
)
def test_the_home_folder_of_an_unknown_user(key: str) -> None:
    given = f"{key}=~no-such-user/x (command line)"
    assert (
        refused(f"{key}=~no-such-user/x") == f"{given}: must be a full path, as this machine knows no such home folder"
    )
    assert flatten(load(None, None, [f"{key}=~/x"]))[key] == "~/x"
    saved = {**DEFAULTS, "data.source": "~no-such-user/x"}  # of a checkpoint that another machine has made
    assert load_again(saved, "checkpoint").data.source == "~no-such-user/x"
    with pytest.raises(UserError, match="data.cache_dir=~no-such-user/x"):
        load_again(saved, "checkpoint", ["data.cache_dir=~no-such-user/x"])


def test_no_message_is_for_programmers(tmp_path: Path) -> None:
    """Any key with nothing, a list, a table, a date or two lines as its value: a one-line error."""
    for key in KEYS:
        for value in ("", "[0.5]", "[x, [1], {a: b}]", "{a: {b: 1}}", "2020-01-01", "!!set {1}", ".nan", '"a\\nb"'):
            try:
                load(file=written(tmp_path, f"{key}: {value}\n"))
            except UserError as error:
                assert str(error).startswith(key), error
                for odd in ("\n", "Field required", "unable to", "after validation", "tuple", "None", "Input"):
                    assert odd not in str(error), (key, value, error)


def test_a_wrong_value_in_a_file_names_the_file_and_one_in_a_preset_the_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "optimizer: {lr: -1}\n", "broken.yaml")
    assert refused(file=file) == f"optimizer.lr=-1 ({file}): must be greater than 0"
    monkeypatch.setattr(sys.modules[preset_names.__module__], "PRESETS", tmp_path)
    assert refused(preset="broken") == "optimizer.lr=-1 (preset broken): must be greater than 0"
    # The place is the one that counted.
    good = written(tmp_path, "optimizer: {lr: 1}\n", "good.yaml")
    with pytest.raises(UserError, match=r"^optimizer.lr=-2 \(command line\)"):
        load("broken", good, ["optimizer.lr=-2"])
    # A value that is overridden later is not validated.
    assert load(file=file, overrides=["optimizer.lr=2"]).optimizer.lr == 2


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("model: {num_layers: true}", "model.num_layers=true"),
        ("optimizer: {lr: true}", "optimizer.lr=true"),
        ("seed: false", "seed=false"),
        ("data: {positive_label: yes}", "data.positive_label=true"),
        ("data: {class_weights: {yes: 2, no: 1}}", "data.class_weights={true: 2, false: 1}"),
        ("optimizer: {betas: [0.9, false]}", "optimizer.betas=[0.9, false]"),
        ("parallel: {partition: [true, 2]}", "parallel.partition=[true, 2]"),
    ],
)
def test_yes_and_no_are_not_numbers_and_not_labels(tmp_path: Path, text: str, setting: str) -> None:
    file = written(tmp_path, text)
    assert refused(file=file) == f"{setting} ({file}): must not be true or false, nor yes or no, unless in quotes"


def test_labels_and_names_may_look_like_numbers(tmp_path: Path) -> None:
    data = load(
        file=written(
            tmp_path, "task: classification\ndata: {positive_label: 1, class_weights: {0: 1, 1: 2.5}, source: 7}\n"
        )
    ).data
    assert (data.positive_label, data.class_weights, data.source) == ("1", {"0": 1.0, "1": 2.5}, "7")
    assert load(overrides=["task=classification", "data.class_weights={0: 1, 1: 2.5}"]).data.class_weights == {
        "0": 1.0,
        "1": 2.5,
    }


def test_names_are_what_was_written_and_not_what_yaml_makes_of_it(tmp_path: Path) -> None:
    """YAML reads 007 as 7, 0123 as 83, 12:30 as 750, 1_0 as 10 and 1.10 as 1.1."""
    found = load(
        file=written(
            tmp_path,
            "task: classification\noutput_dir: 1.10\ntracking_project: 2024_05\ndata:\n  positive_label: 007\n"
            "  source: 0x1F\n  class_weights: {007: 2, 0123: 0x3, 12:30: 1.50, 1_0: 1, 1.10: 1, .5: 1}\n",
        )
    )
    assert (found.output_dir, found.tracking_project, found.data.positive_label) == ("1.10", "2024_05", "007")
    assert found.data.source == "0x1F"
    weights = {"007": 2.0, "0123": 3.0, "12:30": 1.5, "1_0": 1.0, "1.10": 1.0, ".5": 1.0}
    assert found.data.class_weights == weights
    assert load(file=written(tmp_path, dump(found))) == found
    # Numbers stay numbers, and a message shows what was written.
    assert load(file=written(tmp_path, "seed: 0x10\noptimizer: {lr: 2_0.50}\n")).optimizer.lr == 20.5
    file = written(tmp_path, "optimizer: {lr: -1.10}\n")
    assert refused(file=file) == f"optimizer.lr=-1.10 ({file}): must be greater than 0"
    # Two names that are one number.
    assert load(overrides=["task=classification", "data.class_weights={7: 1, 007: 2}"]).data.class_weights == {
        "7": 1.0,
        "007": 2.0,
    }


@pytest.mark.parametrize("word", ["none", "None", "null", "NULL"])
def test_none_in_quotes_is_a_name(word: str, tmp_path: Path) -> None:
    for quote in ("'", '"'):
        text = f"task: classification\ndata: {{positive_label: {quote}{word}{quote}}}\n"
        found = load(file=written(tmp_path, text))
        assert found.data.positive_label == word
        assert load(file=written(tmp_path, dump(found))) == found  # as config.yaml
        assert load_again(json.loads(json.dumps(flatten(found))), "checkpoint") == found
    plain = load(file=written(tmp_path, f"task: classification\ndata: {{positive_label: {word}}}\n"))
    assert plain.data.positive_label is None
    assert load_again(flatten(plain), "checkpoint") == plain
    # What is no name is nothing, however it is written.
    assert load(file=written(tmp_path, f"training: {{max_steps: '{word}'}}\n")).training.max_steps is None


def test_all_values_are_plain_ones(tmp_path: Path) -> None:
    """Whatever remembers how it was written stays with the reader."""

    def kinds(value: Any) -> set[type]:
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        return set().union(*map(kinds, inner)) if isinstance(inner, (list, tuple)) else {type(value)}

    text = (
        "task: 'classification'\noutput_dir: 7\ntracking: ['wandb']\nseed: 07\nmodel: {d_model: '96'}\n"
        "data: {source: 'a', class_weights: {1: 2.50}, split: [0.90, '0.1'], label_column: 1.0}\n"
    )
    assert kinds(load(file=written(tmp_path, text)).model_dump()) == {str, int, float, bool, type(None)}


def test_a_rate_without_a_point_is_a_number_also_in_yaml(tmp_path: Path) -> None:
    # YAML 1.1 reads 1e-3 as a word.
    assert load(file=written(tmp_path, "optimizer: {lr: 1e-3}")).optimizer.lr == 0.001


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed: 1\nmodel: [1\ndata: 2\n", 3),
        ("seed: 1\n\n\n\tmodel: 2\n", 4),
        ("model:\n  num_layers: *x\n", 2),
        ("seed: 1\n? [1, 2]\n: 3\n", 2),
        ("seed: 1\nmodel: !!python/object/apply:os.system ['false']\n", 2),
    ],
)
def test_broken_yaml_names_file_and_line(tmp_path: Path, text: str, line: int) -> None:
    file = written(tmp_path, text)
    assert refused(file=file).startswith(f"{file}, line {line}: not valid YAML: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training:\n  max_steps: 5\ndata: {}\ntraining:\n  log_every: 3\n", ", line 4: not valid YAML: training is"),
        ("model:\n  num_layers: 5\n  num_layers: 6\n", ", line 3: not valid YAML: num_layers is"),
        ("data: {class_weights: {1: 2, '1': 3}}\n", ", line 1: not valid YAML: 1 is"),
        ("seed: 1\nmodel: {d_model: 8}\nmodel.d_model: 16\n", ": model.d_model is"),
    ],
)
def test_a_key_that_is_set_twice_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """PyYAML keeps the last one: of two sections of a name, all keys of the first would be lost."""
    file = written(tmp_path, text)
    assert refused(file=file).startswith(f"{file}{message} set twice")
    assert "not a valid list" in refused("data.class_weights={good: 1, good: 2}")


def test_tables_may_be_merged(tmp_path: Path) -> None:
    text = "model: &a {d_model: 8, num_heads: 2}\ndata: {class_weights: {<<: &b {x: 1}, <<: {x: 3}, x: 2}}\n"
    found = load(file=written(tmp_path, text + "task: classification\n"))
    assert (found.model.d_model, found.data.class_weights) == (8, {"x": 2})


@pytest.mark.parametrize("value", ["[&a [*a]]", "{x: &a {y: *a}}", "[" * 30 + "]" * 30, "[" * 5000])
def test_lists_within_themselves_are_refused(tmp_path: Path, value: str) -> None:
    word = f"data.class_weights={value}"
    assert refused(word) == f"{word}: the value is not a valid list"
    file = written(tmp_path, f"data: {{class_weights: {value}}}\n")
    assert refused(file=file) == f"{file}: not valid YAML: lists or tables nested more than 20 deep, or in themselves"


def test_an_impossible_date_is_refused(tmp_path: Path) -> None:
    """YAML reads it as a date, and Python has none for it."""
    file = written(tmp_path, "data: {source: 2020-13-45}\n")
    assert refused(file=file) == f"{file}: not valid YAML: month must be in 1..12"
    word = "data.evaluation_split=[2020-13-45]"
    assert refused(word) == f"{word}: the value is not a valid list"


def test_a_character_that_yaml_forbids_names_file_and_line(tmp_path: Path) -> None:
    file = written(tmp_path, "seed: 1\nmodel: \0\n")
    assert refused(file=file).startswith(f"{file}, line 2: ")


def test_yaml_that_is_no_table_is_refused(tmp_path: Path) -> None:
    assert "must contain keys and values" in refused(file=written(tmp_path, "- a\n- b\n"))
    assert "model must contain keys and values, not 3" in refused(file=written(tmp_path, "model: 3\n"))


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load(file=written(tmp_path, "# nothing\n")) == Config()


def test_dotted_keys_work_in_files_too(tmp_path: Path) -> None:
    assert load(file=written(tmp_path, "model.num_layers: 3\n")).model.num_layers == 3


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.yaml"
    assert refused(file=missing) == f"{missing}: cannot be read: No such file or directory"
    assert refused(file=tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
    latin = written(tmp_path, b"seed: 1 # caf\xe9\n")
    assert refused(file=latin) == f"{latin}: not valid UTF-8 at byte 13"


def test_a_word_without_equals_is_refused() -> None:
    assert refused("training.max_steps").startswith("training.max_steps: not of the form KEY=VALUE")
    assert refused("data.split=[0.9,").startswith("data.split=[0.9,: ")


def test_a_value_may_hold_equals_signs() -> None:
    assert load(overrides=["data.source=/a=b/c"]).data.source == "/a=b/c"
