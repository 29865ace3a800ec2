"""`data.tokenizer` names a Hugging Face tokenizer.json or its folder: its token numbers, as the library gives them."""

import json
from pathlib import Path

import numpy as np
import pytest
from commands import output as run
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = "The naïve cat sat on my rug!\n  And the hat; “the” RUG.\n" * 80
SETTINGS = [
    "--preset", "tiny", "data.vocab_size=none", "data.workers=1", "data.split=[0.8,0.2]", "training.device=cpu",
    "data.sequence_length=16", "training.batch_size=4", "training.max_steps=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and a tokenizer unlike ours: it normalizes, and puts tokens around a sentence."""
    root = tmp_path_factory.mktemp("tokenizer")
    for name in ("text.txt", "text.tiktoken"):
        (root / name).write_text(TEXT, encoding="utf-8")
    model = Tokenizer(models.BPE(unk_token="[UNK]"))
    model.normalizer = normalizers.NFD()
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Metaspace()
    model.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=90, special_tokens=["[UNK]", "[BOS]"]))
    model.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 1)])
    (root / "own").mkdir()
    model.save(str(root / "own" / "tokenizer.json"))
    return root


@pytest.mark.parametrize("given", ["own", "own/tokenizer.json"])
def test_its_token_numbers_are_trained_on_and_kept(folder: Path, given: str) -> None:
    place = folder / given.replace("/", "-")
    more = [f"data.source={folder / 'text.txt'}", f"data.cache_dir={place / 'cache'}", f"output_dir={place / 'run'}"]
    run("hvd-train", *SETTINGS, *more, f"data.tokenizer={folder / given}")
    library = Tokenizer.from_file(str(folder / "own" / "tokenizer.json"))
    lines = TEXT.splitlines(keepends=True)
    wanted = library.encode("".join(lines[: round(0.8 * len(lines))]), add_special_tokens=False).ids
    (file,) = (place / "cache" / "prepared").glob("*/train*")
    found = np.fromfile(file, np.uint16)
    assert found.tolist() == wanted
    words = ["generate", place / "run", "--prompt", "The cat", "--tokens", 5, "--temperature", 0, "--json"]
    text = json.loads(run("hvd-transformer", *words))["text"]
    assert text.startswith("The cat")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.tokenizer=words"], "must be basic_english, char, bpe, or a Hugging Face tokenizer.json or its folder"),
        (["data.tokenizer={}/none/tokenizer.json"], "none/tokenizer.json: cannot be read: No such file or directory"),
        (["data.tokenizer={}/none.model"], "none.model: cannot be read: No such file or directory"),
        (["data.tokenizer={}/text.tiktoken"], "text.tiktoken: line 1: must be a token in base64, a space and its rank"),
        (["data.tokenizer={}/text.txt"], "text.txt: not a valid tokenizer.json: "),
        (["data.tokenizer={}/own", "data.vocab_size=100"], "own, whose vocabulary is fixed; leave it at none"),
        (["data.tokenizer={}/own", "data.tokenizer_sample_mb=1"], "own is not learned"),
        (["data.tokenizer={}/own", "model.vocab_size=50"], "model.vocab_size=50: must be at least 71, the tokens of"),
        (["data.tokenizer={}/own", "task=translation", "data.source={}"], "only with task=language_model, not task=tr"),
    ],
)
def test_bad_input(folder: Path, tmp_path: Path, words: list[str], message: str) -> None:
    more = [
        f"data.source={folder / 'text.txt'}",
        f"data.cache_dir={tmp_path / 'cache'}",
        f"output_dir={tmp_path / 'run'}",
    ]
    assert message in run("hvd-train", *SETTINGS, *more, *(word.format(folder) for word in words), code=2)
