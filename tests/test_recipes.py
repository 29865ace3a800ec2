"""Runs the commands of docs/recipes.md in order, on one rank, with small data and few steps: each takes what the one
before it has left."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from commands import command
from huggingface import write_bert
from pages import commands as commands_of

LAUNCHER = re.compile(r"^(hvd-transformer launch .*? -- |horovodrun .*?hvd-train )")
TEXT = "The cat's (big, red) hat sat on my rug!\nIs the rug; the cat: “fine”?  Äh, no… 1234 hats.\n"
PAIRS = [("ein roter Hund und eine Katze", "a red dog and a cat"), ("zwei Hunde und ein Hut", "two dogs and a hat")]
SHORT = [
    "training.max_steps=2", "training.epochs=1", "training.batch_size=2", "training.text_samples=0",
    "training.device=cpu", "data.workers=1", "data.cache_dir=cache",
]  # fmt: skip
# Where the data would be fetched, or the model takes its time.
INSTEAD = {
    "multi30k": ["data.vocab_size=300"],
    "llama-tiny": ["data.vocab_size=300", "data.sequence_length=16"],
    "gpt-small": [
        "data.vocab_size=300", "data.sequence_length=16", "model.num_layers=1", "model.d_model=24",
        "model.d_feedforward=48",
    ],
}  # fmt: skip


def write_data(folder: Path) -> None:
    """The files that the page names."""
    for name in ("input.txt", "corpus.txt", "reviews.txt"):
        (folder / name).write_text(TEXT * 60, encoding="utf-8")
    (folder / "own.jsonl").write_text("".join(json.dumps({"text": TEXT * 20}) + "\n" for _ in range(20)))
    (folder / "sentences.de").write_text("".join(f"{german}\n" for german, _ in PAIRS))
    for name, column in (("reviews.csv", "text"), ("ChnSentiCorp_htl_all.csv", "review")):
        rows = "".join(f"{number % 2},a {'good' if number % 2 else 'bad'} room\n" for number in range(60))
        (folder / name).write_text(f"label,{column}\n{rows}")
    (folder / "pairs").mkdir()
    for split, stem in (("train", "train"), ("valid", "val"), ("test", "test_2016_flickr")):
        for language, texts in zip(("de", "en"), zip(*PAIRS, strict=True), strict=True):
            lines = "".join(f"{text}\n" for text in texts) * (40 if split == "train" else 2)
            (folder / "pairs" / f"{stem}.{language}").write_text(lines)
    write_bert(folder / "my-bert")


def shortened(line: str) -> list[str]:
    words = shlex.split(LAUNCHER.sub("hvd-train ", line))
    if words[0] != "hvd-train" and words[1] != "prepare":
        return words
    preset = words[words.index("--preset") + 1] if "--preset" in words else ""
    length = ["data.sequence_length=16"] if "model.pretrained=./my-bert" in words else []  # of this one
    given = any(word.startswith("data.source=") for word in words)
    source = [] if given else ["data.source=pairs" if preset == "multi30k" else "data.source=input.txt"]
    return [*words, *source, *SHORT, *INSTEAD.get(preset, length)]


def test_every_recipe_s_commands_work_in_the_page_s_order(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    write_data(tmp_path)
    lines = commands_of("docs/recipes.md")
    assert len(lines) > 15
    for line in lines:
        if not line.startswith(("hvd-", "horovodrun")):
            subprocess.run(line, shell=True, cwd=tmp_path, check=True)
            continue
        words, _, file = line.partition(" > ")
        done = command(*shortened(words), folder=tmp_path, environment={"HOME": str(tmp_path)})
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert done.stdout, line
        if file:
            (tmp_path / file).write_text(done.stdout)
    german, english, other_english, other_german = (
        (tmp_path / name).read_text().split("\n")[:-1]
        for name in ("pairs/train.de", "pairs/train.en", "translated.en", "translated.de")
    )
    pairs = [
        *zip(german, english, strict=True),
        *zip(german, other_english, strict=True),
        *zip(other_german, english, strict=True),
    ]
    more = ((tmp_path / "more" / f"train.{language}").read_text().split("\n")[:-1] for language in ("de", "en"))
    assert list(zip(*more, strict=True)) == list(dict.fromkeys(pairs))  # each pair once, in the order of the first
