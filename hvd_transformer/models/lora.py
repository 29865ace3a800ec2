"""LoRA (Hu et al. 2021, arXiv 2106.09685) by peft, an optional dependency: adapters beside the weights of a folder's
model, which stay as they are."""

import json
import warnings
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.errors import UserError, missing_extra
from hvd_transformer.huggingface import origin
from hvd_transformer.models.pretrained import load_language_model

ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"  # peft's names
_NAME = "default"  # peft's name of the only adapter, within the names of its weights


def add_adapters(model: nn.Module, folder: Path, config: ModelConfig) -> nn.Module:
    """The model with new adapters, which alone are trained, in the default dtype and from torch's global generator.

    `folder` is the model's. Raises `UserError` if peft is not installed or the model has no such layers.
    """
    given: dict[str, Any] = {"r": config.lora_rank, "target_modules": config.lora_targets, "task_type": "CAUSAL_LM"}
    if config.lora_alpha is not None:
        given["lora_alpha"] = config.lora_alpha
    lora_config = _peft(f"model.lora_rank={config.lora_rank}").LoraConfig(**given)
    found = _adapted(model, lora_config, f"model.lora_targets: {origin(folder)}")
    _peft_config(found).base_model_name_or_path = str(folder.absolute())  # peft has set it to the path as given
    return found


CHANGED_BASE = "is not the model that the checkpoint's adapters were trained on; was it changed?"


def load_adapted(folder: Path) -> nn.Module:
    """The language model of the adapters in a checkpoint or a folder of peft, whose own weights are not read yet."""
    check_adapters(folder)
    config = _peft(str(folder)).LoraConfig.from_pretrained(folder)
    config.inference_mode = False
    if not (base := base_folder(folder)).is_dir():
        told = f"{folder / ADAPTER_CONFIG}: base_model_name_or_path={base}"
        raise UserError(f"{told}: must be a local folder; nothing is downloaded")
    return _adapted(load_language_model(base), config, str(folder))


def check_adapters(folder: Path) -> dict[str, Any]:
    """peft's configuration. Raises `UserError` if it is not of LoRA's adapters of a causal language model."""
    path = folder / ADAPTER_CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        kind = found["peft_type"], found["task_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if kind != ("LORA", "CAUSAL_LM"):
        raise UserError(f"{path}: only LoRA's adapters of causal language models are supported")
    if found.get("use_dora"):
        raise UserError(f"{path}: use_dora=true: DoRA is not supported; merge its adapters with peft first")
    return dict(found)


def base_folder(folder: Path) -> Path:
    """The folder of the model that the adapters in `folder` belong to."""
    return Path(str(check_adapters(folder).get("base_model_name_or_path")))


def merged(model: nn.Module) -> nn.Module:
    """The folder's own model again, with the adapters added to its weights."""
    found: nn.Module = model.merge_and_unload()  # type: ignore[operator]
    return found


def their_name(name: str) -> str:
    """The name of a parameter in a file of peft."""
    return ".".join(part for part in name.split(".") if part != _NAME)


def config_files(model: nn.Module) -> dict[str, str]:
    """peft's own configuration file, as text by file name."""
    config = copy(_peft_config(model))
    config.inference_mode = True  # as peft saves it: whoever loads it does not train it
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return {ADAPTER_CONFIG: (Path(folder) / ADAPTER_CONFIG).read_text(encoding="utf-8")}


def describe(model: nn.Module) -> str:
    """What is trained, in words."""
    config, sizes = _peft_config(model), [(weight.numel(), weight.requires_grad) for weight in model.parameters()]
    trained, total = sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)
    adapted = (name.partition(".lora_A.")[0] for name, _ in model.named_parameters() if ".lora_A." in name)
    targets = sorted({name.rpartition(".")[2] for name in adapted})
    return f"LoRA of rank {config.r} on {', '.join(targets)}: {trained:,} of {total:,} parameters are trained"


def _adapted(model: nn.Module, config: Any, given: str) -> nn.Module:
    tied = _tied_layers(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it corrects fan_in_fan_out itself
            found: nn.Module = _peft(given).get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"{given}: {str(error).splitlines()[0]}") from None
    if any(getattr(module, "base_layer", None) in tied for module in found.modules() if hasattr(module, "base_layer")):
        raise UserError(f"{given}: the output layer shares its weights with the embedding; neither can have adapters")
    return found


def _tied_layers(model: Any) -> list[nn.Module]:
    """The embedding and the output layer, if they share their weights: merging would change both."""
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    if any(layer is None for layer in layers) or layers[0].weight is not layers[1].weight:
        return []
    return layers


def _peft(given: str) -> Any:
    try:
        import peft
    except ImportError:
        raise missing_extra(given, "peft", "lora") from None
    return peft


def _peft_config(model: nn.Module) -> Any:
    return model.peft_config[_NAME]  # type: ignore[index]
