"""`hvd-train --help` lists every key with a default that can be typed as shown."""

import re
from typing import get_args

import pytest

from hvd_transformer.cli.train import reference
from hvd_transformer.config import Config, load
from hvd_transformer.config.load import preset_names
from hvd_transformer.config.schema import KEYS

LINE = re.compile(r"^  ([a-z_.]+)=(.*?)(?:  \((.*)\))?$", re.MULTILINE)
SHOWN = {match[1]: (match[2], match[3]) for match in LINE.finditer(reference())}


def test_every_key_is_shown_once_and_no_other() -> None:
    assert sorted(match[1] for match in LINE.finditer(reference())) == sorted(KEYS)


@pytest.mark.parametrize("key", KEYS)
def test_the_shown_default_is_the_default(key: str) -> None:
    shown, _ = SHOWN[key]
    section, _, name = key.rpartition(".")
    assert load(overrides=[f"{key}={shown}"]) == Config()
    owner = Config.model_fields[section].annotation if section else Config
    description = owner.model_fields[name].description
    assert f"  {key}={shown}" in reference() and description in reference()


@pytest.mark.parametrize("key", ["model.norm", "optimizer.schedule", "training.precision", "data.batching"])
def test_choices_are_shown(key: str) -> None:
    section, _, name = key.partition(".")
    choices = get_args(Config.model_fields[section].annotation.model_fields[name].annotation)
    assert len(choices) > 1
    assert SHOWN[key][1] == " | ".join(choices)


def test_keys_are_grouped_by_section() -> None:
    order = [match[1].partition(".")[0] for match in LINE.finditer(reference()) if "." in match[1]]
    assert len([1 for before, after in zip(order, order[1:], strict=False) if before != after]) == len(set(order)) - 1


def test_every_preset_is_shown_with_its_first_line() -> None:
    presets = reference().partition("\nPresets\n")[2].splitlines()
    assert [line.split()[0] for line in presets] == preset_names()
    assert all(len(line.split()) > 3 for line in presets)
