"""Shards of documents in every form: their tokens are those of the library, and a bad one is named."""

import gzip
import json
import threading
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from commands import command
from documents import DOCUMENTS, FORMATS, compressed, own_tokenizer, reference, table_bytes, write, write_shards

from hvd_transformer.comm.process_map import process_map
from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data import corpus_pieces, prepare_text, shards, text_files
from hvd_transformer.data.build_once import ALONE, PrepareContext, Stopped
from hvd_transformer.data.prepared import PreparedData
from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer
from hvd_transformer.data.text_corpus import open_corpus, open_text
from hvd_transformer.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return own_tokenizer(tmp_path_factory.mktemp("tokenizer") / "own")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(corpus_pieces, "PIECE_BYTES", 2000)
    monkeypatch.setattr(prepare_text, "_GROUP_BYTES", 1)


def prepare(source: object, own: Path | None, root: Path, context=ALONE, **settings) -> PreparedData:
    config = DataConfig(source=str(source), cache_dir=str(root / "cache"), **settings)
    tokenizer = own and PretrainedTokenizer.open(own)
    return prepare_text.prepare_corpus(config, open_corpus(config, context), tokenizer, context)


def tokens(prepared: PreparedData) -> list[list[int]]:
    return [own[:].tolist() for own in prepared.splits.values()]


@pytest.mark.parametrize("ending", FORMATS)
def test_a_pattern_is_cut_by_shares_between_documents(ending: str, tokenizer: Path, tmp_path: Path) -> None:
    write_shards(tmp_path / "data", ending)
    found = tokens(prepare(tmp_path / f"data/*{ending}", tokenizer, tmp_path, split=[0.5, 0.3, 0.2]))
    assert sum(found, []) == reference(tokenizer)
    assert [own[-1] for own in found] == [2, 2, 2]
    sizes = np.array([own.count(2) for own in found]) / len(DOCUMENTS)
    assert np.abs(sizes - [0.5, 0.3, 0.2]).max() < 0.01


@pytest.mark.parametrize("ending", FORMATS)
def test_one_file_is_cut_by_shares(ending: str, tokenizer: Path, tmp_path: Path) -> None:
    """As many documents go to each split as of a file that is not compressed."""
    plain = tokens(prepare(write(tmp_path / "a.jsonl", DOCUMENTS), tokenizer, tmp_path, split=[0.6, 0.2]))
    found = tokens(prepare(write(tmp_path / f"b{ending}", DOCUMENTS), tokenizer, tmp_path, split=[0.6, 0.2]))
    if ending == ".parquet":  # by rows
        found, plain = [[own.count(2) for own in found], [180, 60]]
    assert found == plain


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.zst", ".parquet"])
@pytest.mark.parametrize("layout", ["sub-folders", "train-*", "files", "named"])
def test_folders(ending: str, layout: str, tokenizer: Path, tmp_path: Path) -> None:
    parts = {"train": DOCUMENTS[:200], "validation": DOCUMENTS[200:260], "test": DOCUMENTS[260:]}
    names = {"train": "first"} if layout == "named" else {}
    for stem, texts in parts.items():
        if layout == "files":
            write(tmp_path / "data" / f"{stem}{ending}", texts)
        elif layout == "sub-folders":
            write_shards(tmp_path / "data" / stem, ending, texts)
        else:
            write_shards(tmp_path / "data", ending, texts, stem=names.get(stem, stem))
    prepared = prepare(tmp_path / "data", tokenizer, tmp_path, **names)
    assert tokens(prepared) == [reference(tokenizer, texts) for texts in parts.values()]
    config = DataConfig(source="x", cache_dir=str(tmp_path / "cache"), **names)
    corpus = open_text(config, tmp_path / "data", "valid")  # as `evaluate --data` reads it
    alone = prepare_text.prepare_corpus(config, corpus, PretrainedTokenizer.open(tokenizer), ALONE)
    assert tokens(alone) == [reference(tokenizer, parts["validation"])]


def test_hidden_files_are_no_shards(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for name in ("train/a.txt", "train/._a.txt", "train/.part.txt", "valid.txt", "test.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    spans = open_corpus(DataConfig(source=str(tmp_path))).splits["train"].spans
    assert [span.path.name for span in spans] == ["a.txt"]


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for name in ("train/b\udcfc.txt", "valid.txt", "test.txt"):
        (tmp_path / name).write_text("abc abc\n" * 20)
    found = [prepare(tmp_path, None, tmp_path, tokenizer="char").digest for _ in range(2)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"valid": "/somewhere/valid.txt"}, "invalid file pattern or split names: Non-relative patterns"),
        ({"source": "{}/**.txt"}, "invalid file pattern or split names: Invalid pattern"),
    ],
)
def test_impossible_names(words: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("abc\n")
    given = {"source": str(tmp_path)} | {key: value.format(tmp_path) for key, value in words.items()}
    with pytest.raises(UserError, match=message):
        open_corpus(DataConfig(**given))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["basic_english", "char", "bpe"])
def test_compressed_text_has_the_tokens_of_the_text(kind: str, suffix: str, tmp_path: Path) -> None:
    for folder, ending in (("plain", ""), ("compressed", suffix)):
        (tmp_path / folder).mkdir()
        for number, split in enumerate(("train", "valid", "test")):
            data = "".join(DOCUMENTS[number * 100 : number * 100 + 100]).encode()
            (tmp_path / folder / f"{split}.txt{ending}").write_bytes(compressed(data, ending))
    plain, found = (
        prepare(tmp_path / folder, None, tmp_path, tokenizer=kind, vocab_size=300) for folder in ("plain", "compressed")
    )
    assert tokens(found) == tokens(plain)
    assert found.tokenizer.digest == plain.tokenizer.digest


@pytest.mark.parametrize("ending", [".jsonl.gz", ".parquet"])
def test_the_same_with_workers_and_from_a_sample(ending: str, tmp_path: Path) -> None:
    """And byte pairs are learned from no more than the sample."""
    write_shards(tmp_path / "data", ending)
    settings = {"split": [0.9, 0.1], "tokenizer_sample_mb": 4 / 1024, "vocab_size": 300}
    messages: list[str] = []
    alone = prepare(tmp_path / f"data/*{ending}", None, tmp_path, PrepareContext(report=messages.append), **settings)
    assert any("byte pairs are learned from 0.0 of 0.0 MiB" in message for message in messages)
    with process_map(2) as mapped:
        shared = prepare(tmp_path / f"data/*{ending}", None, tmp_path / "2", PrepareContext(mapped), **settings)
    assert tokens(shared) == tokens(alone)
    assert sum(own.count(1) for own in tokens(alone)) == len(DOCUMENTS)


def test_a_link_into_the_cache_of_huggingface_hub(tokenizer: Path, tmp_path: Path) -> None:
    """The files there are links to others, which have no ending."""
    write(tmp_path / "blob.parquet", DOCUMENTS).rename(tmp_path / "abcdef")
    (tmp_path / "train-00000-of-00001.parquet").symlink_to("abcdef")
    for source in ("train-00000-of-00001.parquet", "train-*"):
        found = tokens(prepare(tmp_path / source, tokenizer, tmp_path, split=[0.5, 0.5]))
        assert sum(found, []) == reference(tokenizer)


@pytest.mark.parametrize("source", ["data/train-*", "data"])
def test_a_link_to_a_shard_that_is_away_is_named(source: str, tokenizer: Path, tmp_path: Path) -> None:
    """Training would go on with the others."""
    (tmp_path / "data").mkdir()
    for name in ("train-0", "train-1", "valid", "test"):
        write(tmp_path / f"data/{name}.jsonl", DOCUMENTS)
    (tmp_path / "data/train-2.jsonl").symlink_to(tmp_path / "away")
    with pytest.raises(UserError, match=rf"train-2.jsonl: a link to {tmp_path}/away, which is not there$"):
        prepare(tmp_path / source, tokenizer, tmp_path)


def test_two_shards_of_which_one_vanished_are_no_single_file(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("train-0", "train-1", "valid", "test"):
        write(tmp_path / f"data/{name}.jsonl", DOCUMENTS)
    prepared = prepare(tmp_path / "data", tokenizer, tmp_path)
    (tmp_path / "data/train-1.jsonl").unlink()
    with pytest.raises(UserError, match=f"train-1.jsonl: vanished since {prepared.folder} was prepared"):
        prepare(tmp_path / "data", tokenizer, tmp_path)


def test_files_are_measured_on_this_host(tokenizer: Path, tmp_path: Path) -> None:
    """The workers of `mpirun` may be on hosts that do not have them."""

    def elsewhere(function, items):
        assert "shards" not in function.__module__
        return map(function, items)

    write_shards(tmp_path / "data", ".jsonl.gz")
    context = PrepareContext(elsewhere)
    found = prepare(tmp_path / "data/*.jsonl.gz", None, tmp_path, context, tokenizer="bpe", vocab_size=300)
    assert len(found.splits) == 3


@pytest.mark.parametrize("when", ["cut", "read"])
def test_a_long_compressed_file_can_be_stopped_while_its_beginning_is_skipped(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To be asked whether to stop is a sign of progress, too, without which a rank counts as hanging."""
    began, given_up = threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        while not given_up.is_set():  # computing
            pass

    def line_boundary(path: Path, target: int) -> int:
        if when == "cut":
            slow()
        return text_files.line_boundary(path, target)

    def read_pieces(span, *more):
        if span.start:
            slow()
        yield from shards.read_pieces(span, *more)

    monkeypatch.setattr(shards, "line_boundary", line_boundary)
    monkeypatch.setattr(corpus_pieces, "read_pieces", read_pieces)
    source = write(tmp_path / "a.jsonl.gz", DOCUMENTS)
    threading.Timer(60.0, given_up.set).start()
    try:
        with pytest.raises(Stopped):
            prepare(source, None, tmp_path, PrepareContext(should_stop=began.is_set), tokenizer="char")
    finally:
        given_up.set()


def test_another_end_of_documents_is_another_preparation(tokenizer: Path, tmp_path: Path) -> None:
    """The tokenizer.json is the same."""
    file, other = write(tmp_path / "a.jsonl", DOCUMENTS), own_tokenizer(tmp_path / "other")
    (other / "tokenizer_config.json").write_text('{"eos_token": "[PAD]"}')
    ends = [[own[-1] for own in tokens(prepare(file, chosen, tmp_path))] for chosen in (tokenizer, other)]
    assert ends == [[2] * 3, [1] * 3]


TABLE = pyarrow.table({"id": [1], "url": ["x"], "text": [["a"]]})
GOOD = b'{"text": "a cat"}\n'
BAD = [
    ("x.parquet", table_bytes(TABLE.drop(["text"])), "has no column text (data.text_column); it has id, url"),
    ("x.parquet", table_bytes(TABLE), "text (data.text_column) must be a column of strings, not list<"),
    (
        "x.parquet",
        table_bytes(pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])),
        "has several columns text (data.text_column); give each column its own name",
    ),
    ("x.jsonl", b"[" + GOOD.strip() + b"]", ": each line must be a JSON object with the column text, not an array"),
    ("x.parquet", table_bytes(TABLE)[:-9], "not a valid Parquet file: "),
    ("x.parquet", table_bytes(pyarrow.table({"text": ["a", "b", None]})), "row 2: text must be a text, not null"),
    ("x.jsonl.gz", gzip.compress(GOOD * 9)[:-5], "damaged: Compressed file ended before"),
    ("x.jsonl.gz", GOOD, "damaged: Not a gzipped file"),
    ("x.jsonl.zst", compressed(GOOD * 9, ".zst")[:-5], "damaged: the file ends within a frame"),
    ("x.jsonl.zst", GOOD, "damaged: "),
    ("x.jsonl.gz", gzip.compress(GOOD * 2 + b"{\n" + GOOD), ", line 3: not valid JSON: "),
    ("x.jsonl.zst", compressed(GOOD + b'{"body": "a"}\n' + GOOD, ".zst"), ", line 2: has no column text"),
    ("x.txt.gz", gzip.compress(b"caf\xe9"), "not valid UTF-8 at byte 3"),
]


# Numbered: compressed bytes, which hold the time, are no names that two processes agree on.
@pytest.mark.parametrize(("name", "data", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_shard_is_named(name: str, data: bytes, message: str, tokenizer: Path, tmp_path: Path) -> None:
    """Also among good ones, which are kept: with a better file the next start goes on after them. Then nothing is left
    of the first one."""
    for split in ("valid", "test"):
        good = compressed(b"a cat" if ".txt" in name else GOOD, Path(name).suffix)
        data_of = table_bytes(pyarrow.table({"text": ["a cat"]})) if name.endswith("parquet") else good
        (tmp_path / split).mkdir()
        (tmp_path / split / name).write_bytes(data_of)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / name.replace("x", "a", 1)).write_bytes(data_of)
    (tmp_path / "train" / name).write_bytes(data)
    with pytest.raises(UserError) as error:
        prepare(tmp_path, tokenizer, tmp_path)
    told = str(error.value)
    assert told.startswith(str(tmp_path / "train" / name))
    assert message in told and "\n" not in told
    (tmp_path / "train" / name).write_bytes(data_of)
    messages: list[str] = []
    prepared = prepare(tmp_path, tokenizer, tmp_path, PrepareContext(report=messages.append))
    assert "resumes after" in messages[1]
    assert len(prepared.splits["train"]) == 2 * len(prepared.splits["valid"])
    assert sorted(path.suffix for path in prepared.folder.parent.iterdir()) == ["", ".lock", ".lock"]


def test_bad_sources(tokenizer: Path, tmp_path: Path) -> None:
    write_shards(tmp_path / "mixed", ".jsonl.gz")
    write_shards(tmp_path / "mixed", ".parquet")
    for stem in ("train", "validation"):
        write_shards(tmp_path / "splits", ".jsonl", stem=stem)
    cases = {
        "mixed/*": r"mixed/\*: files that end in .jsonl.gz and in .parquet; give one kind",
        "nothing/*.jsonl": r"nothing/\*.jsonl: no such file; names must end in .txt, .jsonl, ",
        "splits/*": "has files of the splits train and valid; name their folder, or the files of one split",
        "splits": "no file of the test split; accepted names: .*; two numbers in data.split: no test split",
    }
    for source, message in cases.items():
        with pytest.raises(UserError, match=message) as error:
            prepare(tmp_path / source, tokenizer, tmp_path)
        assert "\n" not in str(error.value)
    found = tokens(prepare(tmp_path / "splits", tokenizer, tmp_path, split=[0.9, 0.1]))
    assert found == [reference(tokenizer)] * 2
    with pytest.raises(UserError, match="data.valid=x: only if data.source is a folder"):
        prepare(tmp_path / "mixed/*.parquet", tokenizer, tmp_path, valid="x")
    one = write(tmp_path / "one.jsonl.gz", DOCUMENTS[:1])
    with pytest.raises(UserError, match="one.jsonl.gz: data.split leaves the valid split of 1 files empty"):
        prepare(one, tokenizer, tmp_path)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz"])
@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_is_no_json_lines(name: str, indent: int | None, tokenizer: Path, tmp_path: Path) -> None:
    text = json.dumps([{"text": text} for text in DOCUMENTS], indent=indent).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    with pytest.raises(UserError, match=f"{name}.* must be a JSON object with the column text, not an array$"):
        prepare(tmp_path / name, tokenizer, tmp_path)


def test_each_earlier_preparation_is_read_once(tokenizer: Path, tmp_path: Path, monkeypatch) -> None:
    """A mixture prepares many sources, each of which looks for earlier states of itself."""
    read: list[Path] = []
    whole = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path), whole(path))[1])
    for number in range(6):
        write_shards(tmp_path / f"source{number}", ".jsonl")
        prepare(tmp_path / f"source{number}" / "*.jsonl", tokenizer, tmp_path)
    indices = [path for path in read if path.name == "index.json"]
    assert len(indices) == len(set(indices)) == 5


@pytest.mark.parametrize(("ending", "package"), [(".parquet", "pyarrow"), (".jsonl.zst", "zstandard")])
def test_a_library_that_is_not_installed_is_named(ending: str, package: str, tmp_path: Path) -> None:
    file = write(tmp_path / f"a{ending}", DOCUMENTS)
    words = [f"data.source={file}", f"data.cache_dir={tmp_path / 'cache'}", "data.tokenizer=char"]
    done = command("hvd-transformer", "prepare", *words, hide=[package])
    extra = {"pyarrow": "parquet", "zstandard": "zstd"}[package]
    message = f"{file}: needs {package}; install it with: pip install 'hvd-transformer[{extra}]'\n"
    assert (done.returncode, done.stderr.endswith(message)) == (2, True)


@pytest.mark.parametrize(("ending", "tells"), [(".jsonl", True), (".jsonl.gz", False)])
def test_progress_is_told_within_a_shard(
    ending: str, tells: bool, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a compressed one it is known only afterwards how long it is."""
    monkeypatch.setattr(corpus_pieces, "REPORT_SECONDS", -1.0)
    for name, documents in (("train-0", DOCUMENTS[:150]), ("train-1", DOCUMENTS[150:]), ("valid", DOCUMENTS[:9])):
        write(tmp_path / "data" / f"{name}{ending}", documents)
    said: list[str] = []
    prepare(tmp_path / "data", tokenizer, tmp_path, PrepareContext(report=said.append), split=[0.9, 0.1])
    train = [int(line.split()[-2]) for line in said if "train" in line and line.endswith(" %")]
    assert train == sorted(train)
    assert (len(set(train)) > 10) == tells
    assert max(train) < 100


@pytest.mark.parametrize("source", ["x.jsonl", "x.jsonl.gz", "*.jsonl"])
def test_an_array_is_refused_before_its_line_is_read(
    source: str, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its single line may have many gigabytes."""

    def refuse(*given: object) -> int:
        pytest.fail("looks for the end of the line")

    for module in ("text_corpus", "shards"):
        monkeypatch.setattr(f"hvd_transformer.data.{module}.line_boundary", refuse)
    data = b"\xef\xbb\xbf [" + b",".join([GOOD.strip()] * 2000) + b"]"
    name = source.replace("*", "x")
    (tmp_path / name).write_bytes(compressed(data, Path(name).suffix))
    with pytest.raises(UserError, match=f"{name}: each line must be a JSON object with the column text, not an array"):
        prepare(tmp_path / source, tokenizer, tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.txt.gz", gzip.compress(b""), "x.txt.gz: no text in it"),
        ("x.jsonl.zst", compressed(b"", ".zst"), "x.jsonl.zst: no text in it"),
        (
            "x.parquet",
            table_bytes(pyarrow.table({"text": pyarrow.array([], pyarrow.string())})),
            "parquet: no rows in it",
        ),
        ("*.txt", b"", "x.txt: no text in it"),
    ],
    ids=["gz", "zst", "parquet", "pattern"],
)
def test_nothing_in_it(name: str, data: bytes, message: str, tokenizer: Path, tmp_path: Path) -> None:
    """That is not for other shares of `data.split` to mend."""
    (tmp_path / name.replace("*", "x")).write_bytes(data)
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / name, tokenizer, tmp_path)


def test_many_small_files_go_to_other_processes_together(tokenizer: Path, tmp_path: Path, monkeypatch) -> None:
    """Each item takes a copy of the tokenizer along, which may have megabytes. The tokens are the same."""
    for number, document in enumerate(DOCUMENTS):
        write(tmp_path / "data" / f"s-{number:05}.jsonl", [document])
    alone = tokens(prepare(tmp_path / "data/*.jsonl", tokenizer, tmp_path / "alone", split=[0.8, 0.2]))
    groups: list[int] = []

    def counted(function, items):
        for item in items:
            if getattr(function, "func", None) is prepare_text._encode_all:
                groups.append(len(item))
            yield function(item)

    monkeypatch.setattr(prepare_text, "_GROUP_BYTES", 2**20)
    context = PrepareContext(counted)
    assert tokens(prepare(tmp_path / "data/*.jsonl", tokenizer, tmp_path, context, split=[0.8, 0.2])) == alone
    assert len(groups) == 2 and sum(groups) == len(DOCUMENTS)


def test_what_is_in_a_group_before_a_bad_file_is_kept(tokenizer: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(prepare_text, "_GROUP_BYTES", 2**20)
    monkeypatch.setattr(prepare_text, "SAVED_BYTES", 1)
    for number, document in enumerate(DOCUMENTS[:60]):
        write(tmp_path / "data" / f"s-{number:05}.jsonl", [document])
    bad = tmp_path / "data" / "s-00030.jsonl"
    kept, messages = bad.read_bytes(), list[str]()
    bad.write_bytes(b"no json\n")
    with pytest.raises(UserError, match=r"s-00030.jsonl, line 1"):
        prepare(tmp_path / "data/*.jsonl", tokenizer, tmp_path, split=[0.9, 0.1])
    bad.write_bytes(kept)
    context = PrepareContext(report=messages.append)
    found = tokens(prepare(tmp_path / "data/*.jsonl", tokenizer, tmp_path, context, split=[0.9, 0.1]))
    assert sum(found, []) == reference(tokenizer, DOCUMENTS[:60])
    assert any("resumes after" in message for message in messages)


def test_a_pattern_of_one_file_is_prepared_anew_for_other_shares(tokenizer: Path, tmp_path: Path) -> None:
    write_shards(tmp_path / "data", ".jsonl", number=1)
    sizes = []
    for split in ([0.9, 0.05, 0.05], [0.4, 0.3, 0.3]):
        found = tokens(prepare(tmp_path / "data/*.jsonl", tokenizer, tmp_path, split=split))
        assert sum(found, []) == reference(tokenizer)
        sizes.append([own.count(2) for own in found])
    assert [own[0] for own in sizes] == pytest.approx([270, 120], abs=3)
