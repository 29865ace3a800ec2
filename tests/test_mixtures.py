"""`data.sources` and `data.document_mask` from the command line: one tokenizer, the splits of all sources, and what is
refused."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from commands import output as run

from hvd_transformer.config import load
from hvd_transformer.config.mixture import source_names
from hvd_transformer.data.build_once import ALONE
from hvd_transformer.data.prepare_mixture import prepare_sources
from hvd_transformer.data.sampler import Replica
from hvd_transformer.data.token_file import MixedTokens
from hvd_transformer.tasks.language_model_task import LanguageModelTask
from hvd_transformer.tasks.registry import known_metrics

SETTINGS = [
    "--preset", "tiny", "data.vocab_size=none", "data.workers=1", "data.split=[0.8,0.1,0.1]", "training.device=cpu",
    "data.sequence_length=16", "training.batch_size=4", "training.max_steps=2", "training.text_samples=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Documents of other letters each, in columns of other names; a text; one without a test split."""
    folder, rng = tmp_path_factory.mktemp("mixture"), random.Random(4)
    for name, column, letters in (("a", "text", "abcd "), ("b", "body", "wxyz ")):
        rows = [{column: "".join(rng.choices(letters, k=rng.randint(3, 60)))} for _ in range(150)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "c.txt").write_text("0123456789 9876543210\n" * 100)
    return folder


def sources(folder: Path, *entries: str) -> str:
    return f"data.sources=[{', '.join(f'{{source: {folder}/{entry}}}' for entry in entries)}]"


def train(root: Path, *words: object, code: int = 0) -> str:
    return run(
        "hvd-train", *SETTINGS, f"data.cache_dir={root / 'cache'}", f"output_dir={root / 'run'}", *words, code=code
    )


def documents(path: Path, column: str) -> list[str]:
    return [json.loads(line)[column] for line in path.read_text().splitlines()]


def test_one_tokenizer_is_learned_from_all_training_splits(folder: Path, tmp_path: Path) -> None:
    mixed = sources(folder, "a.jsonl", "b.jsonl, text_column: body", "c.txt")
    words = [mixed, f"data.cache_dir={tmp_path}", "data.split=[0.8,0.1,0.1]", "data.tokenizer=char"]
    data = prepare_sources(load(overrides=words).data, None, ALONE)
    assert set(data.tokenizer.tokens) == {"<unk>", "</s>", "\n", *"abcdwxyz 0123456789"}
    texts = [documents(folder / "a.jsonl", "text"), documents(folder / "b.jsonl", "body")]
    for name in ("train", "valid", "test"):
        assert len(data.splits[name].files) == 3
    for number, rows in enumerate(texts):
        files = [data.splits[name].files[number] for name in ("train", "valid", "test")]
        found = np.concatenate([file[:] for file in files])
        place = data.tokenizer.tokens.index
        assert found.tolist() == [token for row in rows for token in (*map(place, row), place("</s>"))]


def test_byte_pairs_of_a_mixture_are_those_of_its_texts_together(folder: Path, tmp_path: Path) -> None:
    common = [f"data.cache_dir={tmp_path}", "data.vocab_size=300"]
    for name in ("one", "two", "both"):
        (tmp_path / name).mkdir()
        for split in ("train", "valid", "test"):
            rows = {"one": documents(folder / "a.jsonl", "text"), "two": documents(folder / "b.jsonl", "body")}
            chosen = rows.get(name, [*rows["one"], *rows["two"]])
            text = "".join(json.dumps({"text": row}) + "\n" for row in chosen)
            (tmp_path / name / f"{split}.jsonl").write_text(text)
    mixed = prepare_sources(load(overrides=[*common, sources(tmp_path, "one", "two")]).data, None, ALONE)
    whole = prepare_sources(load(overrides=[*common, f"data.source={tmp_path / 'both'}"]).data, None, ALONE)
    assert mixed.tokenizer.digest == whole.tokenizer.digest
    assert mixed.tokenizer.vocab_size == 300
    assert (
        np.concatenate([file[:] for file in mixed.splits["train"].files]).tolist() == whole.splits["train"][:].tolist()
    )


def evaluated(root: Path, *words: object) -> tuple[dict[str, float], int]:
    found = json.loads(run("hvd-transformer", "evaluate", root / "run", "--json", *words))
    return found["metrics"], found["count"]


def test_losses_of_a_mixture_are_those_of_all_its_sources(folder: Path, tmp_path: Path) -> None:
    """Sources with splits of their own; each also evaluated by itself."""
    for name, shift in (("one", 0), ("two", 100)):
        (tmp_path / name).mkdir()
        rows = documents(folder / "a.jsonl", "text")
        for split, part in {"train": rows, "valid": rows[:30], "test": rows[shift : shift + 40]}.items():
            text = "".join(json.dumps({"text": row}) + "\n" for row in part)
            (tmp_path / name / f"{split}.jsonl").write_text(text)
    mixed = sources(tmp_path, "one, weight: 3", "two, weight: 1")
    said = train(tmp_path, mixed, "data.tokenizer=char", "data.document_mask=true")
    assert f"[{tmp_path}/one, {tmp_path}/two]: " in said
    assert len((tmp_path / "run" / "samples.jsonl").read_text().splitlines()) >= 1
    parts = {name: evaluated(tmp_path, "--data", tmp_path / name / "test.jsonl") for name in ("one", "two")}
    mixed, count = evaluated(tmp_path)
    assert count == sum(own for _, own in parts.values())
    whole = sum(own["loss"] * number for own, number in parts.values())
    assert mixed["loss"] == pytest.approx(whole / count, rel=1e-6)
    for name, (own, _) in parts.items():
        assert set(own) == {"loss", "perplexity"}
        assert mixed[f"{name}_loss"] == pytest.approx(own["loss"], rel=1e-6)
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert all(row[key] and summary[key] for key in ("valid_one_loss", "valid_two_loss"))
    assert re.search(r"valid loss .*, perplexity .*, one loss \d.*, two loss \d", said)
    run("hvd-transformer", "report", tmp_path / "run")
    assert (tmp_path / "run" / "losses.png").is_file()


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["/data/web.jsonl", "../code.jsonl.zst", "c4-en", "wikitext2"], ["web", "code", "c4_en", "wikitext2"]),
        (["web/*.jsonl.zst", "code/*.jsonl.zst", "books/train-*"], ["web", "code", "train"]),
        (["web/train-*.parquet", "code/train-*.parquet"], ["web_train", "code_train"]),
        (["x/web/en.txt", "y/web/en.txt", "z/de.txt"], ["x_web_en", "y_web_en", "z_de"]),
        (["a.txt", "a.txt"], ["a_1", "a_2"]),
        (["*.jsonl", "b.jsonl"], ["source_1", "b_2"]),
    ],
)
def test_names_of_sources(given: list[str], names: list[str]) -> None:
    entries = ", ".join(f"{{source: '{source}'}}" for source in given)
    assert source_names(load(overrides=[f"data.sources=[{entries}]"]).data) == names


@pytest.mark.parametrize(
    ("entries", "words", "told"),
    [
        (["a.jsonl, weight: 0", "c.txt, weight: 0"], [], "data.sources: all weights are 0"),
        (["a.jsonl, weight: -1"], [], "data.sources, entry 1 .*a.jsonl.: weight=-1.0: must be a number of at least 0"),
        (["a.jsonl, epochs: 0"], [], "entry 1 .*: epochs=0.0: must be a number above 0"),
        (["a.jsonl", "c.txt, weight: 1"], [], "entry 1: has no weight, as others have"),
        (["a.jsonl, wait: 1"], [], "entry 1: unknown key wait; an entry has source, weight, epochs, text_column"),
        (["a.jsonl, weight: yes"], [], "data.sources=.* must not be true or false"),
        (["a.jsonl", "gone.jsonl"], [], "gone.jsonl: no such file or folder"),
        (["a.jsonl"], ["data.batching=columns"], "data.sources: not with data.batching=columns"),
        (["a.jsonl"], ["data.source=wikitext2"], "data.source=wikitext2: not with data.sources"),
        (["a.jsonl"], ["task=translation"], "data.sources=.*: not with task=translation"),
        (["c.txt"], ["data.document_mask=true"], "document_mask=true: data.sources=.*c.txt. has no documents"),
        (["a.jsonl"], ["data.sequence_length=128", "data.split=[0.01,0.5,0.49]"], "needs 129"),
    ],
)
def test_what_is_no_mixture_gets_one_line(
    entries: list[str], words: list[str], told: str, folder: Path, tmp_path: Path
) -> None:
    line = train(tmp_path, sources(folder, *entries), "data.tokenizer=char", *words, code=2)
    assert re.search(told, line), line


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "c.txt has no documents; give JSON lines (.jsonl), Parquet"),
        (["data.batching=columns"], "document_mask=true: not with data.batching=columns"),
        (["task=classification"], "data.document_mask=True: not with task=classification"),
    ],
)
def test_where_documents_cannot_be_kept_apart(words: list[str], told: str, folder: Path, tmp_path: Path) -> None:
    source = f"data.source={folder / 'c.txt'}"
    assert told in train(tmp_path, source, *words, "data.tokenizer=char", "data.document_mask=true", code=2)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("limit", "counts"), [("none", (204, 60)), ("2", (60, 20)), ("3", (90, 30))])
def test_evaluation_sees_all_sources_also_where_it_is_limited(limit: str, counts: tuple[int, int], ranks: int) -> None:
    """Every token but the first of each source once; of 21 and 6 windows, a part of each."""
    files = [np.arange(1000, 1205, dtype="<u2"), np.arange(2000, 2061, dtype="<u2")]
    data = SimpleNamespace(splits={"valid": MixedTokens(files, ["a", "b"])}, has_documents=False)
    words = ["data.sources=[{source: a}, {source: b}]", "data.sequence_length=10", "training.batch_size=4"]
    config, found = load(overrides=[*words, f"training.eval_batches={limit}"]), []
    for rank in range(ranks):
        task = LanguageModelTask(config, data, Replica(rank, ranks))
        assert task.metric_names == known_metrics(config) == ["loss", "perplexity", "a_loss", "b_loss"]
        found += [token for batch in task.evaluation_batches("valid") for token in batch.targets.flatten().tolist()]
        for name, batches in task.evaluation_parts("valid").items():
            assert all((token < 2000) == (name == "a") for batch in batches for token in batch.targets.flatten())
    assert len(found) == len(set(found))
    assert (sum(token < 2000 for token in found), sum(token >= 2000 for token in found)) == counts


def test_a_source_that_no_evaluation_sees_chooses_no_checkpoint() -> None:
    tokens = MixedTokens([np.arange(100), np.arange(10)], ["a", "b"])
    data = SimpleNamespace(splits={"valid": tokens}, has_documents=False)
    words = ["data.sources=[{source: a}, {source: b}]", "data.sequence_length=10", "training.batch_size=1"]
    config = load(overrides=[*words, "training.eval_batches=1"])
    assert LanguageModelTask(config, data, Replica(0, 1)).metric_names == ["loss", "perplexity", "a_loss"]


def test_the_best_metric_is_the_loss_of_a_source_of_the_mixture(folder: Path, tmp_path: Path) -> None:
    mixed = sources(folder, "a.jsonl", "b.jsonl, text_column: body")
    told = train(tmp_path, mixed, "training.best_metric=c_loss", code=2)
    assert "training.best_metric=c_loss: no such metric of this task; it has loss, perplexity, a_loss, b_loss" in told
