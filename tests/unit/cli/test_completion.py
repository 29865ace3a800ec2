"""Tab completes presets, keys and choices, in the way each shell splits KEY=VALUE."""

import os
import subprocess
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from conftest import rank_environment

from hvd_transformer.cli.main import group
from hvd_transformer.cli.train import command
from hvd_transformer.config.load import preset_names
from hvd_transformer.config.schema import KEYS

# What bash would offer for the words of a command line, the last of them incomplete.
TAB = """
eval "$(_HVD_TRAIN_COMPLETE=bash_source hvd-train)"
compopt() { echo "compopt $@"; }
function=$(complete -p hvd-train | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
$function hvd-train
printf '%s\\n' "${COMPREPLY[@]}"
"""


def offered(words: str, incomplete: str) -> list[str]:
    """Where the shell leaves KEY=VALUE one word."""
    completions = ShellComplete(command, {}, "hvd-train", "_HVD_TRAIN_COMPLETE").get_completions(
        words.split(), incomplete
    )
    return [item.value for item in completions]


def test_keys_are_completed_up_to_the_equals_sign() -> None:
    assert offered("", "") == [f"{key}=" for key in KEYS]
    assert offered("--preset tiny seed=1", "optimizer.e") == ["optimizer.eps=", "optimizer.ema="]
    assert offered("", "nonsense") == []


@pytest.mark.parametrize(
    ("word", "choices"),
    [
        ("optimizer.name=", ["sgd", "adam", "adamw", "muon"]),
        ("optimizer.name=ad", ["adam", "adamw"]),
        ("training.compile=", ["true", "false"]),
        ("model.head_bias=", ["true", "false", "none"]),
        ("task=", ["language_model", "translation", "classification"]),
        ("data.tokenizer=b", ["basic_english", "bpe"]),
        ("data.class_weights=", ["balanced", "none"]),
        ("training.max_steps=n", ["none"]),
        ("optimizer.lr=", []),
        ("nonsense=", []),
    ],
)
def test_choices_are_completed_after_it(word: str, choices: list[str]) -> None:
    key, _, value = word.partition("=")
    assert offered("", word) == [f"{key}={choice}" for choice in choices]
    if key in KEYS:  # as bash splits it
        assert offered(f"seed=1 {key} =", value) == choices
        assert offered(f"seed=1 {key}", value or "=") == choices


def test_presets_and_options_are_completed() -> None:
    assert offered("--preset", "") == preset_names()
    assert offered("--preset", "tu") == ["tutorial-1b", "tutorial-small"]
    assert offered("", "--print") == ["--print-config"]


def test_the_settings_of_other_commands_are_completed_too() -> None:
    complete = ShellComplete(group, {}, "hvd-transformer", "_HVD_TRANSFORMER_COMPLETE").get_completions
    assert [item.value for item in complete(["plan"], "seed")] == ["seed="]
    assert [item.value for item in complete(["config"], "")] == ["diff", "schema"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["optimizer.na"], ["compopt -o nospace", "optimizer.name="]),
        (["optimizer.name", "=", "ad"], ["adam", "adamw"]),
    ],
)
def test_the_line_of_the_guide_enables_it_in_bash(words: list[str], told: list[str], tmp_path: Path) -> None:
    environment = rank_environment() | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run(
        ["bash", "-c", TAB, "bash", "hvd-train", *words],
        env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.splitlines() == told
