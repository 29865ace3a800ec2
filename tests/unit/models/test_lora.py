"""Which folders of peft are read."""

import json
from pathlib import Path
from typing import Any

import pytest
from chats import write_chat_model

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.errors import UserError
from hvd_transformer.models import lora, pretrained
from hvd_transformer.models.lora import ADAPTER_CONFIG, base_folder, check_adapters

LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "model", "r": 8}


def write(folder: Path, config: Any) -> Path:
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_lora_of_a_causal_language_model(tmp_path: Path) -> None:
    folder = write(tmp_path, LORA)
    assert check_adapters(folder) == LORA
    assert base_folder(folder) == Path("model")


def test_adapters_name_their_model_so_that_any_folder_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    write_chat_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    model = lora.add_adapters(
        pretrained.load_language_model(Path("model")), Path("model"), ModelConfig(pretrained="model", lora_rank=2)
    )
    (folder := tmp_path / "adapters").mkdir()
    (folder / ADAPTER_CONFIG).write_text(lora.config_files(model)[ADAPTER_CONFIG])
    assert base_folder(folder) == tmp_path / "model"


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({**LORA, "peft_type": "IA3"}, "only LoRA's adapters of causal language models are supported"),
        ({**LORA, "task_type": "SEQ_CLS"}, "only LoRA's adapters of causal language models are supported"),
        ({**LORA, "use_dora": True}, "use_dora=true: DoRA is not supported; merge its adapters with peft first"),
        ({}, "cannot be read: 'peft_type'"),
        ([], "cannot be read: list indices must be integers or slices, not str"),
    ],
)
def test_other_adapters_are_refused(tmp_path: Path, config: Any, line: str) -> None:
    with pytest.raises(UserError) as raised:
        check_adapters(write(tmp_path, config))
    assert str(raised.value) == f"{tmp_path / ADAPTER_CONFIG}: {line}"
