"""Every form of data.source, and every way it can be wrong."""

import ast
import inspect
import re
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data import python_docs
from hvd_transformer.data.text_corpus import open_corpus, open_evaluated, open_text
from hvd_transformer.errors import UserError


def read(span):
    return span.path.read_bytes()[span.start : span.end]


def spans(corpus):
    """Of splits that have one each."""
    return [span for split in corpus.splits.values() for (span,) in [split.spans]]


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(f"text of {name}\n")
    return folder


@pytest.fixture(scope="module")
def docs(tmp_path_factory):
    return open_corpus(DataConfig(cache_dir=str(tmp_path_factory.mktemp("docs"))))


def test_python_docs(docs):
    assert list(docs.splits) == ["train", "valid", "test"]
    texts = {split: read(span).decode() for split, span in zip(docs.splits, spans(docs), strict=True)}
    total = sum(map(len, texts.values()))
    assert total > 1_000_000
    assert 0.85 < len(texts["train"]) / total < 0.93
    assert 0.03 < len(texts["valid"]) / total < 0.08
    assert 0.03 < len(texts["test"]) / total < 0.08
    whole = "".join(texts.values())
    # Known documents, each once: a topic, and a class of a module that is parsed, never imported.
    source = Path(sysconfig.get_path("stdlib"), "collections", "__init__.py").read_text()
    tree = ast.parse(source)
    [counter] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Counter"]
    assert whole.count(ast.get_docstring(counter)) == 1
    from pydoc_data.topics import topics

    assert whole.count(inspect.cleandoc(topics["assert"]).strip()) == 1


def test_python_docs_are_the_same_again_and_a_document_is_in_one_split(docs, tmp_path):
    python_docs.write_splits(tmp_path)
    splits = [span.path.read_text() for span in spans(docs)]
    assert [(tmp_path / span.path.name).read_text() for span in spans(docs)] == splits
    documents = list(python_docs.documents())
    for document in documents:
        if len(document) > 200:
            assert sum(f"{document}\n\n" in text for text in splits) == 1
    assert sum(len(document) + 2 for document in documents) == sum(map(len, splits))


@pytest.mark.parametrize(
    "names",
    [
        ("train.txt", "valid.txt", "test.txt"),
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("wiki.train.raw", "wiki.valid.raw", "wiki.test.raw"),
        ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
        ("train.txt", "val.txt", "test.txt"),
        ("train.raw", "validation.txt", "test.raw"),
    ],
)
def test_folder(tmp_path, names):
    folder = fill(tmp_path / "corpus", *names, "README.md")
    corpus = open_corpus(DataConfig(source=str(folder), cache_dir=str(tmp_path)))
    assert [read(span).decode() for span in spans(corpus)] == [f"text of {name}\n" for name in names]
    assert corpus.name == "corpus"


@pytest.mark.parametrize(
    "name",
    ["a.JSONL", "a.ndjson", "a.jsonlines", "a.csv", "a.tsv.gz", "a.Json", "a.PARQUET", "a.txt.bz2", "a.jsonl.xz"],
)
def test_files_of_rows_are_no_running_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"text": "a"}\n' * 100)
    config = DataConfig(source=str(tmp_path / name), cache_dir=str(tmp_path / "cache"))
    only = "only .gz and .zst are read" if name.endswith((".bz2", ".xz")) else "must end in .jsonl"
    for opened in (lambda: open_corpus(config), lambda: open_text(config, tmp_path / name, None)):
        with pytest.raises(UserError, match=f"/{name}: .*{only}"):
            opened()


def test_rows_are_no_running_text_where_the_file_is_a_link(tmp_path: Path) -> None:
    """As in the cache of huggingface_hub."""
    (tmp_path / "blob").write_text("text,label\n" * 100)
    (tmp_path / "a.csv").symlink_to("blob")
    with pytest.raises(UserError, match="/a.csv: its rows would be read as running text"):
        open_corpus(DataConfig(source=str(tmp_path / "a.csv"), cache_dir=str(tmp_path / "cache")))


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["train.jsonl", "train-0.jsonl"], "both train.jsonl and train-0.jsonl"),
        (["train.jsonl", "train/0.jsonl"], "both train.jsonl and train/0.jsonl"),
        (["train/0.jsonl", "train-0.jsonl"], "both train/0.jsonl and train-0.jsonl"),
        (["train.txt", "train-0.jsonl"], "both train.txt and train-0.jsonl"),
        (["train.txt", "train/0.txt"], "both train.txt and train/0.txt"),
    ],
)
def test_a_split_that_is_there_twice(tmp_path: Path, names: list[str], told: str) -> None:
    (tmp_path / "corpus" / "train").mkdir(parents=True)
    folder = fill(tmp_path / "corpus", *names, "valid.txt", "test.txt")
    with pytest.raises(UserError, match=f"corpus: train: {told}"):
        open_corpus(DataConfig(source=str(folder), cache_dir=str(tmp_path / "cache")))


def test_other_data_beside_a_split(tmp_path: Path) -> None:
    others = [
        "train_small.txt",
        "train-notes.jsonl",
        "train.json",
        "train.meta.json",
        "train.txt.gz",
        "test.results.json",
    ]
    folder = fill(tmp_path / "corpus", "train.txt", "valid.txt", "test.txt", *others)
    corpus = open_corpus(DataConfig(source=str(folder), cache_dir=str(tmp_path / "cache")))
    assert [span.path for span in corpus.splits["train"].spans] == [folder / "train.txt"]


def test_only_evaluated(tmp_path: Path) -> None:
    """Without a training split; a file is evaluated as a whole."""
    folder = fill(tmp_path / "corpus", "valid.txt")
    shards = fill(tmp_path / "shards", "train-0.jsonl", "valid-0.jsonl", "test-0.jsonl")
    for source, wanted in {
        folder: {"valid": [folder / "valid.txt"]},
        shards: {"valid": [shards / "valid-0.jsonl"], "test": [shards / "test-0.jsonl"]},
        folder / "valid.txt": {"valid": [folder / "valid.txt"]},
        tmp_path / "sh*" / "*0.jsonl": None,
        tmp_path / "shards" / "t[e]*0.jsonl": {"valid": [shards / "test-0.jsonl"]},
    }.items():
        config = DataConfig(source=str(source), cache_dir=str(tmp_path))
        if wanted is None:
            with pytest.raises(UserError, match="has files of the splits train and valid and test"):
                open_evaluated(config)
            continue
        corpus = open_evaluated(config)
        assert {split: [span.path for span in own.spans] for split, own in corpus.splits.items()} == wanted
        assert all(own.share is None for own in corpus.splits.values()) and corpus.train_bytes == 0


@pytest.mark.parametrize("source", ["tokens", "tokens/val.bin", "tokens/*.bin"])
def test_token_files_that_are_only_evaluated(tmp_path: Path, source: str) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "val.bin").write_bytes(bytes(20))
    corpus = open_evaluated(DataConfig(source=str(tmp_path / source), cache_dir=str(tmp_path)))
    ((split, (span,)),) = corpus.splits.items()
    assert (split, span.path, span.start, span.end) == ("valid", tmp_path / "tokens" / "val.bin", 0, 10)


def test_the_files_of_splits_can_be_named(tmp_path):
    folder = fill(tmp_path / "corpus", "train.txt", "first.txt", "wiki.second.tokens", "test.txt")
    config = DataConfig(source=str(folder), train="first", valid="second")
    texts = [read(span).decode() for span in spans(open_corpus(config))]
    assert texts == ["text of first.txt\n", "text of wiki.second.tokens\n", "text of test.txt\n"]
    assert list(open_text(config, folder, "valid").splits) == ["valid"]
    with pytest.raises(UserError, match="corpus: no file of the test split; accepted names: third.txt, third.raw"):
        open_corpus(DataConfig(source=str(folder), test="third", valid="second"))


def test_named_splits_need_a_folder(tmp_path):
    (tmp_path / "text.txt").write_text("a\n" * 100)
    with pytest.raises(UserError, match=r"^data.valid=x: only if data.source is a folder; .*text.txt is one file"):
        open_corpus(DataConfig(source=str(tmp_path / "text.txt"), valid="x"))
    for source in ("python-docs", "wikitext2"):
        with pytest.raises(
            UserError, match=f"^data.train=x: only if data.source is a folder; {source} is not a folder"
        ):
            open_corpus(DataConfig(source=source, train="x", cache_dir=str(tmp_path)))


def test_published_folder_filled_by_hand_needs_no_network(tmp_path):
    names = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
    fill(tmp_path / "wikitext2", *names)
    corpus = open_corpus(DataConfig(source="wikitext2", cache_dir=str(tmp_path)))
    assert [span.path for span in spans(corpus)] == [tmp_path / "wikitext2" / name for name in names]


def test_published_folder_filled_in_part(tmp_path):
    folder = fill(tmp_path / "wikitext2", "wiki.train.tokens")
    with pytest.raises(UserError, match="no file of the valid split; accepted names: .*wiki.valid.tokens"):
        open_corpus(DataConfig(source="wikitext2", cache_dir=str(tmp_path)))
    assert (folder / "wiki.train.tokens").exists()


@settings(deadline=None)
@given(
    lines=st.lists(st.text("aé", max_size=9), min_size=1, max_size=60),
    split=st.sampled_from([[0.9, 0.05, 0.05], [0.8, 0.2], [0.5, 0.25, 0.25], [0.4, 0.3]]),
)
def test_one_file_is_cut_at_line_ends(tmp_path_factory, lines, split):
    path = tmp_path_factory.mktemp("file") / "text.txt"
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(data)
    try:
        corpus = open_corpus(DataConfig(source=str(path), split=split, cache_dir=str(path.parent)))
    except UserError as error:
        assert re.search(r"leaves the (train|valid|test) split empty", str(error))
        return
    assert list(corpus.splits) == ["train", "valid", "test"][: len(split)]
    position, share = 0, 0.0
    longest = max(len(line.encode()) + 1 for line in lines)
    for span, fraction in zip(spans(corpus), split, strict=True):
        share += fraction
        assert span.start == position
        assert 0 <= span.end - share * len(data) + 1 <= longest + 1
        assert read(span).endswith(b"\n")
        position = span.end
    if sum(split) == 1:
        assert position == len(data)


def make_bad(kind: str, folder: Path) -> tuple[str, str]:
    """A wrong source, and what its message must say."""
    if kind == "missing":
        return str(folder / "nowhere"), r"nowhere: no such file or folder, and no known name; known: python-docs"
    if kind == "misspelt":
        return "wikitext-2", r"no known name, did you mean wikitext2\?"
    if kind == "empty folder":
        return str(fill(folder / "corpus")), r"corpus: the folder is empty; it must hold train.txt, valid.txt"
    if kind == "no test file":
        fill(folder / "corpus", "train.txt", "valid.txt")
        return str(folder / "corpus"), r"corpus: no file of the test split; accepted names: test.txt, .*wiki.test"
    if kind == "empty split":
        fill(folder / "corpus", "train.txt", "test.txt")
        (folder / "corpus" / "valid.txt").touch()
        return str(folder / "corpus"), r"valid.txt: the valid split is empty"
    if kind == "empty file":
        (folder / "text.txt").touch()
        return str(folder / "text.txt"), r"text.txt: the file is empty"
    assert kind == "one line"
    (folder / "text.txt").write_text("a single line")
    return str(folder / "text.txt"), r"text.txt: data.split=\[0.9, 0.05, 0.05\] leaves the valid split empty"


@pytest.mark.parametrize(
    "kind", ["missing", "misspelt", "empty folder", "no test file", "empty split", "empty file", "one line"]
)
def test_bad_source(tmp_path, kind):
    source, message = make_bad(kind, tmp_path)
    with pytest.raises(UserError, match=message) as error:
        open_corpus(DataConfig(source=source, cache_dir=str(tmp_path / "cache")))
    assert "\n" not in str(error.value)
