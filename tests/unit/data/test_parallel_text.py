"""Pairs from every form of file, and one line for what is wrong with them."""

import gzip
from pathlib import Path

import pytest

from hvd_transformer.config import load
from hvd_transformer.data.parallel_text import PairFiles
from hvd_transformer.errors import UserError

PAIRS = [("Ein Hund.", "A dog."), ("Zwei — Häuser", "Two houses"), ("drei", "three \x85 four\u2028five")]


def write(folder: Path, name: str, lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in lines).encode()
    (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)


def side_by_side(folder: Path, name: str, end: str = "", pairs: list[tuple[str, str]] = PAIRS) -> None:
    for column, language in enumerate(("de", "en")):
        write(folder, f"{name}.{language}{end}", [pair[column] for pair in pairs])


def read(path: Path, *words: str) -> dict[str, list[tuple[str, ...]]]:
    rows = PairFiles(load(overrides=["task=translation", *words]).data).open(path, seed=1)
    return {split: [row.texts for row in rows.splits[split]()] for split in rows.splits}


def refused(path: Path, *words: str) -> str:
    with pytest.raises(UserError) as caught:
        read(path, *words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize(
    "names", [("train", "valid", "test"), ("train", "val", "test_2016_flickr"), ("train", "dev", None)]
)
def test_two_files_side_by_side(tmp_path: Path, names: tuple[str, str, str | None], end: str) -> None:
    for name in filter(None, names):
        side_by_side(tmp_path, name, end)
    assert read(tmp_path) == dict.fromkeys(("train", "valid", "test")[: 3 if names[2] else 2], PAIRS)


def test_a_test_split_that_is_named_must_be_there(tmp_path: Path) -> None:
    """Otherwise the job would be trained, and never tested."""
    for split in ("train", "valid", "newstest"):
        write(tmp_path, f"{split}.tsv", ["\t".join(pair) for pair in PAIRS])
    assert read(tmp_path, "data.test=newstest")["test"] == PAIRS
    line = refused(tmp_path, "data.test=newstst")
    assert line.startswith(f"{tmp_path}: no test split; it must hold ") and "newstst" in line


def test_names_and_languages_can_be_chosen(tmp_path: Path) -> None:
    for name in ("news-2011", "news-2012", "test_a", "test_b"):
        side_by_side(tmp_path, name)
    words = ["data.train=news-2011", "data.valid=news-2012", "data.test=test_b"]
    assert set(read(tmp_path, *words)) == {"train", "valid", "test"}
    turned = read(tmp_path, *words, "data.source_language=en", "data.target_language=de")
    assert turned["train"] == [(target, source) for source, target in PAIRS]
    message = refused(tmp_path, *words[:2])
    assert message == f"{tmp_path}: several test splits; choose with data.test=test_a or data.test=test_b"


def test_a_test_split_named_after_both_languages(tmp_path: Path) -> None:
    for split in ("train", "valid", "test2016.de-en"):
        for number, language in enumerate(("de", "en")):
            write(tmp_path, f"{split}.{language}", [pair[number] for pair in PAIRS])
    (tmp_path / "test.de.bak").write_text("old\n")
    assert read(tmp_path)["test"] == PAIRS


def test_tabs(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        write(tmp_path, f"{split}.tsv", ["\t".join(pair) for pair in PAIRS])
    assert read(tmp_path) == {"train": PAIRS, "valid": PAIRS}
    write(tmp_path, "valid.tsv", ["a\tb", "", "c\td"])  # left out as an empty sample
    assert read(tmp_path)["valid"] == [("a", "b"), ("", ""), ("c", "d")]
    write(tmp_path, "valid.tsv", ["a\tb", "no tab"])
    assert refused(tmp_path) == f"{tmp_path}/valid.tsv, line 2: 0 tabs; a pair is a source, one tab and its target"


def test_one_file_of_pairs_is_split_by_seed(tmp_path: Path) -> None:
    pairs = [(f"quelle {number}", f"target {number}") for number in range(100)]
    write(tmp_path, "pairs.tsv", ["\t".join(pair) for pair in pairs])
    found = read(tmp_path / "pairs.tsv", "data.split=[0.8, 0.1, 0.1]")
    assert {split: len(rows) for split, rows in found.items()} == {"train": 80, "valid": 10, "test": 10}
    assert sorted(pair for rows in found.values() for pair in rows) == sorted(pairs)
    assert found == read(tmp_path / "pairs.tsv", "data.split=[0.8, 0.1, 0.1]")
    assert set(read(tmp_path / "pairs.tsv", "data.split=[0.9, 0.1]")) == {"train", "valid"}
    write(tmp_path, "few.tsv", ["a\tb"] * 3)
    assert "leaves the valid split of 3 rows empty" in refused(tmp_path / "few.tsv", "data.split=[0.9, 0.1]")


SGM = '<{kind}set setid="x" srclang="any">\n<doc sysid="ref" docid="{doc}">\n{segments}\n</doc>\n</{kind}set>\n'


def sgm(kind: str, documents: dict[str, list[str]]) -> str:
    return "".join(
        SGM.format(
            kind=kind,
            doc=doc,
            segments="\n".join(
                f'<p>\n<seg id="{number}">{text}</seg>\n</p>' for number, text in enumerate(texts, start=1)
            ),
        )
        for doc, texts in documents.items()
    )


def test_segments_are_matched_by_document_and_number(tmp_path: Path) -> None:
    side_by_side(tmp_path, "train")
    side_by_side(tmp_path, "valid")
    source, reference = tmp_path / "newstest-deen-src.de.sgm", tmp_path / "newstest-deen-ref.en.sgm"
    source.write_text(sgm("src", {"a": ["eins", "zwei &amp; drei"], "b": ["vier\n fünf"]}))
    reference.write_text(sgm("ref", {"b": ["four five"], "a": ["one", "two &amp; three"]}))
    found = read(tmp_path, "data.test=newstest")["test"]
    assert found == [("eins", "one"), ("zwei & drei", "two & three"), ("vier fünf", "four five")]
    reference.write_text(sgm("ref", {"b": ["four five"], "a": ["one"]}))
    message = f"{source}: document a, segment 2 has no partner in {reference.name}"
    assert refused(tmp_path, "data.test=newstest") == message
    reference.write_text(sgm("ref", {"b": ["four five"], "a": ["one", "two", "more"]}))
    message = f"{reference}: document a, segment 3 has no partner in {source.name}"
    assert refused(tmp_path, "data.test=newstest") == message
    reference.unlink()
    assert refused(tmp_path, "data.test=newstest") == f"{source}: its partner {reference.name} is missing"


def test_what_is_wrong_with_the_files(tmp_path: Path) -> None:
    assert "no train split; it must hold train.de and train.en" in refused(tmp_path)
    side_by_side(tmp_path, "train")
    assert "no valid split; it must hold valid.de" in refused(tmp_path)
    assert "it holds train.de, train.en" in refused(tmp_path)
    same = (
        f"data.source_language=en: also data.target_language, so that {tmp_path}/train.en would be its own translation"
    )
    assert refused(tmp_path, "data.source_language=en") == same
    write(tmp_path, "val.de", ["a"])
    assert refused(tmp_path) == f"{tmp_path}/val.de: its partner val.en is missing"
    write(tmp_path, "val.en", ["a", "b"])
    message = f"{tmp_path}/val.de has 1 lines, {tmp_path}/val.en has 2; parallel files must have equally many"
    assert refused(tmp_path) == message
    (tmp_path / "val.en").write_bytes(b"\xff\n")
    assert refused(tmp_path).startswith(f"{tmp_path}/val.en, line 1: not valid UTF-8: ")
    (tmp_path / "val.de").unlink()
    (tmp_path / "val.en").unlink()
    side_by_side(tmp_path, "val", ".gz")
    damaged = tmp_path / "val.de.gz"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert refused(tmp_path).startswith(f"{damaged}, after line ")


def test_the_only_tabbed_file_that_begins_with_test(tmp_path: Path) -> None:
    for name in ("train.tsv", "valid.tsv", "test_2016.tsv.gz"):
        write(tmp_path, name, ["\t".join(pair) for pair in PAIRS])
    assert read(tmp_path)["test"] == PAIRS
    write(tmp_path, "test_2017.tsv", ["a\tb"])
    assert "data.test=test_2016 or data.test=test_2017" in refused(tmp_path)


def test_other_data_are_evaluated_although_the_training_was_tested_on_a_published_set(tmp_path: Path) -> None:
    side_by_side(tmp_path, "test")
    config = load(overrides=["task=translation", "data.test=sacrebleu:wmt14", f"data.cache_dir={tmp_path}/none"]).data
    (found,) = PairFiles(config).open_split(tmp_path, None).splits.values()
    assert [row.texts for row in found()] == PAIRS
    assert not (tmp_path / "none").exists()
