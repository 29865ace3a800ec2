"""Write a folder with what is needed to use a trained model: by these commands, or by another library."""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hvd_transformer import __version__, atomic
from hvd_transformer.checkpoint.saved_run import CONFIG
from hvd_transformer.checkpoint.store import MODEL
from hvd_transformer.data.as_gguf_tokenizer import add_tokenizer
from hvd_transformer.data.as_transformers_tokenizer import tokenizer_json, transformers_files, vocabulary_of
from hvd_transformer.data.chat_template import end_tokens
from hvd_transformer.data.load_tokenizer import load_tokenizer
from hvd_transformer.data.pair_tokenizer import PairTokenizer
from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer
from hvd_transformer.data.tokenizers import BEGIN, END, BPETokenizer, Tokenizer
from hvd_transformer.errors import UserError, missing_extra
from hvd_transformer.inference.trained_model import FORMAT, Trained, load_trained, read_adapters, read_facts
from hvd_transformer.models import lora, pretrained
from hvd_transformer.models.as_ctranslate2 import Vocabularies, as_ctranslate2
from hvd_transformer.models.as_gguf import add_llama
from hvd_transformer.models.as_transformers import as_transformers

_WEIGHTS = ("model*.safetensors", f"{MODEL}.index.json")
_TOKENIZERS = (
    "*tokenizer.json",
    "*vocabulary.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "*.jinja",
)


class _Export(NamedTuple):
    """What is written into a new folder, and a sentence about it."""

    write: Callable[[Path], None]
    said: str = ""


def export(path: Path, folder: Path, form: str = "native", *, merge: bool = False) -> str:
    """Write a folder with only what is needed to use the model of a checkpoint, in one of the `FORMATS`; `merge`: a
    Hugging Face folder of the whole model, LoRA's adapters added. Returns a sentence about it, which may be empty.

    Raises `UserError` if the format cannot hold the model, or the folder is not empty or cannot be written.
    """
    try:
        made = _merged(path) if merge else FORMATS[form](path)
    except UserError as error:
        given = "--merge: " if merge else "" if form == "native" else f"--format {form}: "
        raise UserError(f"{given}{error}") from None
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already; choose a new or empty folder")
    is_new = not folder.exists()
    partial = folder / f".{uuid4().hex}"
    try:
        partial.mkdir(parents=True)
        made.write(partial)
        _follow_umask(partial)
        for file in partial.iterdir():
            file.rename(folder / file.name)
        partial.rmdir()
    except BaseException as error:
        shutil.rmtree(folder if is_new else partial, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError)):  # the latter does not keep the system's error
            raise UserError(f"{folder}: cannot be written: {getattr(error, 'strerror', error)}") from None
        raise
    return made.said


def _follow_umask(folder: Path) -> None:
    """safetensors makes its files private (0600): they get the permissions of the others."""
    other = next(file for file in folder.iterdir() if file.suffix != ".safetensors")
    for file in folder.glob("*.safetensors"):
        with suppress(OSError):  # a file system without permissions
            shutil.copymode(other, file)


def _native(path: Path) -> _Export:
    source, facts = read_facts(path)
    if facts["model"].get("lora_rank") is not None:
        return _adapters(source)
    own, tokenizer_files, generation = _our_facts(facts), dict[str, bytes](), dict[str, str]()
    if facts["model"].get("pretrained") is not None:
        own = json.loads((source / CONFIG).read_text(encoding="utf-8")) | {pretrained.OURS: own}
        if facts["task"] == "translation":
            tokenizer = load_tokenizer(source, "target-")
            assert isinstance(tokenizer, PairTokenizer)
            tokenizer_files = tokenizer.folder_files
        elif facts["task"] == "language_model":
            generation = _generation_file(load_tokenizer(source, ""), source / pretrained.GENERATION)
    copied = {path for pattern in (*_TOKENIZERS, pretrained.GENERATION) for path in source.glob(pattern)}
    if tokenizer_files:  # which the checkpoint has in one file per side
        copied -= set(source.glob(f"*-{PairTokenizer.file_name}"))
    model: Any = None
    if facts["model"].get("pretrained") is not None and pretrained.has_other_names(str(own.get("model_type"))):
        model = load_trained(path, facts["task"]).model
        model = model.model if facts["task"] == "classification" else model
        _check_generation(path, model)
        model._weight_conversions = None  # those of its family, not of our checkpoint, which needed none
    else:
        copied |= {path for pattern in _WEIGHTS for path in source.glob(pattern)}

    def write(folder: Path) -> None:
        if model is not None:
            model.save_pretrained(folder)
        for file in copied:
            shutil.copyfile(file, folder / file.name)
        for name, content in tokenizer_files.items():
            (folder / name).write_bytes(content)
        _write_texts(folder, generation)
        _write_config(folder, own)

    return _Export(write)


def _adapters(source: Path) -> _Export:
    """peft's folder of LoRA's adapters."""

    def write(folder: Path) -> None:
        for file in [path for pattern in (*_TOKENIZERS, lora.ADAPTER_CONFIG) for path in source.glob(pattern)]:
            shutil.copyfile(file, folder / file.name)
        save_file(read_adapters(source), folder / lora.ADAPTER, {"format": "pt"})

    return _Export(write)


def _merged(path: Path) -> _Export:
    """A Hugging Face folder whose weights are those that the adapters were trained on, and the adapters added."""
    _, facts = read_facts(path)
    if facts["model"].get("lora_rank") is None:
        raise UserError(f"{path}: its model has no adapters (model.lora_rank); leave out --merge")
    trained, own = load_trained(path, facts["task"]), _our_facts({**facts, "model": {"pretrained": "."}})
    _check_generation(path, trained.model)

    def write(folder: Path) -> None:
        trained.model.save_pretrained(folder)  # type: ignore[operator]
        tokenizer = trained.tokenizers["text"]
        _write_texts(folder, {**tokenizer.files(), **_generation_file(tokenizer, folder / pretrained.GENERATION)})
        theirs = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        _write_config(folder, theirs | {pretrained.OURS: own})

    return _Export(write)


def _check_generation(path: Path, model: Any) -> None:
    """Raise `UserError` for a generation_config.json that transformers does not write again."""
    config = getattr(model, "generation_config", None)
    try:
        if config is not None:
            config.validate(strict=True)
    except ValueError as error:
        raise UserError(f"{path}: its model's generation_config.json: {' '.join(str(error).split())[:300]}") from None


def _transformers(path: Path) -> _Export:
    trained, source, facts = _load(path, "language_model")
    made = as_transformers(trained.config, _weights(trained))
    tokenizer, generation = trained.tokenizers["text"], source / pretrained.GENERATION
    texts = {**transformers_files(tokenizer, trained.num_positions), **_generation_file(tokenizer, generation)}
    special = {"eos_token_id": tokenizer.document_end}
    if isinstance(tokenizer, PretrainedTokenizer):
        special |= {"bos_token_id": tokenizer.begin, "pad_token_id": tokenizer.own_pad}
    ours = {pretrained.OURS: _our_facts(facts) | {"model": {"pretrained": "."}}}
    own = {**made.config, **special, **ours}

    def write(folder: Path) -> None:
        if generation.is_file():
            shutil.copyfile(generation, folder / generation.name)
        _write_texts(folder, texts)
        save_file(made.weights, folder / MODEL, {"format": "pt"})
        _write_config(folder, own)

    more = f"; its output layer is not tied: {made.untied:,} more parameters" if made.untied else ""
    return _Export(write, f"{made.config['architectures'][0]} of transformers{more}")


def _ctranslate2(path: Path) -> _Export:
    trained, _, _ = _load(path, "translation")
    texts = {role: tokenizer_json(tokenizer) for role, tokenizer in trained.tokenizers.items()}
    source, target = (vocabulary_of(texts[role]) for role in ("source", "target"))
    vocabularies = Vocabularies(source, target, target[0], target[BEGIN], target[END])
    spec = as_ctranslate2(trained.config, _weights(trained), vocabularies)

    def write(folder: Path) -> None:
        _write_texts(folder, {f"{role}-{BPETokenizer.file_name}": text for role, text in texts.items()})
        spec.save(str(folder))

    return _Export(write, "for ctranslate2.Translator; its tokens are those of source- and target-tokenizer.json")


def _gguf(path: Path) -> _Export:
    trained, _, _ = _load(path, "language_model")
    try:
        import gguf
    except ImportError:
        raise missing_extra(None, "gguf", "gguf") from None
    weights, name = _weights(trained), "model.gguf"
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    add_llama(writer, trained.config, weights)
    add_tokenizer(writer, trained.tokenizers["text"], weights["embedding.embedding.weight"].size(0))

    def write(folder: Path) -> None:
        writer.write_header_to_file(folder / name)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return _Export(write, f"{name} for llama.cpp, in 32 bits; llama-quantize makes it smaller")


FORMATS: Mapping[str, Callable[[Path], _Export]] = {
    "native": _native,
    "transformers": _transformers,
    "ctranslate2": _ctranslate2,
    "gguf": _gguf,
}


def _load(path: Path, task: str) -> tuple[Trained, Path, dict[str, Any]]:
    """A model of our own blocks, the folder of its files, and what its config.json would say. Raises `UserError` if it
    is not of this task."""
    source, facts = read_facts(path)
    if facts["model"].get("lora_rank") is not None:
        raise UserError(f"{path}: has LoRA's adapters; use --merge, which writes a whole model for transformers")
    if facts["model"].get("pretrained") is not None:
        raise UserError(
            f"{path}: is a Hugging Face folder already, which converters of other programs read; leave out --format"
        )
    if facts["task"] != task:
        raise UserError(f"{path}: only for task={task}")
    return load_trained(path, task), source, facts


def _weights(trained: Trained) -> dict[str, Tensor]:
    return {name: weight.data for name, weight in trained.model.named_parameters()}


def _generation_file(tokenizer: Tokenizer, known: Path | None = None) -> dict[str, str]:
    """generation_config.json with every token that ends a text, if it is not only the tokenizer's own: a chat model
    ends its answers with that of its template. `known`: the file as it is, if it exists."""
    try:
        found = {} if known is None else json.loads(known.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        found = {}
    before = pretrained.eos_token_ids(found)
    ends = list(dict.fromkeys([*before, *end_tokens(tokenizer)]))
    if len(ends) == len(before) or ends == [tokenizer.document_end]:
        return {}
    return {pretrained.GENERATION: json.dumps({**found, "eos_token_id": ends}, indent=1) + "\n"}


def _our_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "made_by": f"hvd-transformer {__version__}", **facts}


def _write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Last: without it the folder is not recognized."""
    atomic.write_text(folder / CONFIG, json.dumps(config, indent=1, ensure_ascii=False) + "\n")
