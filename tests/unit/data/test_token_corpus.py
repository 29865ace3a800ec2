"""Token files of nanoGPT and Megatron are mapped where they are; what does not fit is told in a line."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commands import output as run
from documents import DOCUMENTS, own_tokenizer, reference

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.build_once import ALONE, PrepareContext
from hvd_transformer.data.prepare_text import prepare_corpus
from hvd_transformer.data.prepared import PreparedData
from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer
from hvd_transformer.data.text_corpus import open_corpus, open_text
from hvd_transformer.errors import UserError

SPLITS = {"train": DOCUMENTS[:200], "val": DOCUMENTS[200:260], "test": DOCUMENTS[260:]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return own_tokenizer(tmp_path_factory.mktemp("tokenizer") / "own")


def write_nanogpt(path: Path, ids: list[int]) -> Path:
    """As its prepare.py does."""
    np.array(ids, np.uint16).tofile(path)
    return path


def write_megatron(prefix: Path, documents: list[list[list[int]]], code: int = 4, dtype: type = np.int32) -> Path:
    """As described in megatron/core/datasets/indexed_dataset.py: documents of sequences of tokens."""
    sequences = [ids for document in documents for ids in document]
    np.concatenate([np.array(ids, dtype) for ids in sequences]).tofile(prefix.with_suffix(".bin"))
    lengths = np.array([len(ids) for ids in sequences], np.int32)
    pointers = np.cumsum([0, *lengths[:-1]], dtype=np.int64) * np.dtype(dtype).itemsize
    begins = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    head = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    counts = struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(begins))
    prefix.with_suffix(".idx").write_bytes(head + counts + b"".join(a.tobytes() for a in (lengths, pointers, begins)))
    return prefix


def prepare(source: Path, own: Path | None, root: Path, **settings) -> PreparedData:
    config = DataConfig(source=str(source), cache_dir=str(root / "cache"), **settings)
    tokenizer = own and PretrainedTokenizer.open(own)
    return prepare_corpus(config, open_corpus(config), tokenizer, ALONE)


def tokens(prepared: PreparedData) -> list[list[int]]:
    return [own[:].tolist() for own in prepared.splits.values()]


def documents_of(tokenizer: Path, texts: list[str]) -> list[list[list[int]]]:
    """Each document as one sequence or two."""
    found = [reference(tokenizer, [text]) for text in texts]
    return [[ids] if len(ids) % 2 else [ids[:5], ids[5:]] for ids in found]


def test_nanogpt(tokenizer: Path, tmp_path: Path) -> None:
    files = [
        write_nanogpt(tmp_path / f"{split}.bin", reference(tokenizer, SPLITS[split])) for split in ("train", "val")
    ]
    prepared = prepare(tmp_path, tokenizer, tmp_path)
    assert tokens(prepared) == [reference(tokenizer, SPLITS[split]) for split in ("train", "val")]
    assert [own.path for own in prepared.splits.values()] == files
    assert not list(prepared.folder.glob("*.bin"))
    assert prepare(tmp_path, tokenizer, tmp_path).digest == prepared.digest
    write_nanogpt(files[1], reference(tokenizer, SPLITS["test"]))
    assert prepare(tmp_path, tokenizer, tmp_path).digest != prepared.digest


@pytest.mark.parametrize(("code", "dtype"), [(1, np.uint8), (4, np.int32), (5, np.int64), (8, np.uint16)])
@pytest.mark.parametrize("name", ["{}", "{}_text_document"])
def test_megatron(name: str, code: int, dtype: type, tokenizer: Path, tmp_path: Path) -> None:
    for split, texts in SPLITS.items():
        write_megatron(tmp_path / name.format(split), documents_of(tokenizer, texts), code, dtype)
    prepared = prepare(tmp_path, tokenizer, tmp_path)
    assert list(prepared.splits) == ["train", "valid", "test"]
    assert tokens(prepared) == [reference(tokenizer, texts) for texts in SPLITS.values()]
    assert {own.dtype for own in prepared.splits.values()} == {np.dtype(dtype).str.replace("|", "<")}


@pytest.mark.parametrize("ending", ["", ".idx", ".bin"])
def test_one_file_is_cut(ending: str, tokenizer: Path, tmp_path: Path) -> None:
    """Megatron's between documents."""
    prefix = write_megatron(tmp_path / "my_text_document", documents_of(tokenizer, DOCUMENTS))
    found = tokens(prepare(prefix.with_suffix(ending), tokenizer, tmp_path, split=[0.5, 0.3, 0.2]))
    assert sum(found, []) == reference(tokenizer)
    assert [own[-1] for own in found] == [2, 2, 2]
    assert [len(own) / len(sum(found, [])) for own in found] == pytest.approx([0.5, 0.3, 0.2], abs=0.01)
    config = DataConfig(source="x", cache_dir=str(tmp_path / "cache"))
    whole = open_text(config, prefix.with_suffix(ending), None)
    assert tokens(prepare_corpus(config, whole, PretrainedTokenizer.open(tokenizer), ALONE)) == [sum(found, [])]
    file = write_nanogpt(tmp_path / "a.bin", reference(tokenizer))
    ids = reference(tokenizer)
    first, second = (round(len(ids) * share) for share in (0.25, 0.75))
    assert tokens(prepare(file, tokenizer, tmp_path, split=[0.25, 0.5])) == [ids[:first], ids[first:second]]


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (write_nanogpt, "{}_{:03}"),
        (write_nanogpt, "{}/{:03}"),
        (write_megatron, "{}/{:03}"),
        (write_megatron, "{}-{:03}_text_document"),
    ],
)
def test_shards_of_a_folder(form: Callable, name: str, tokenizer: Path, tmp_path: Path) -> None:
    """Each file is mapped where it is; together they are what one file would be, in the order of their names."""
    paths = []
    for split, texts in SPLITS.items():
        for number in (2, 0, 1):
            path = tmp_path / name.format(split, number)
            path.parent.mkdir(exist_ok=True)
            part = texts[number * len(texts) // 3 : (number + 1) * len(texts) // 3]
            if form is write_nanogpt:
                write_nanogpt(path.with_suffix(".bin"), reference(tokenizer, part))
            else:
                write_megatron(path, documents_of(tokenizer, part))
            paths.append(path.with_suffix(".bin"))
    prepared = prepare(tmp_path, tokenizer, tmp_path)
    assert tokens(prepared) == [reference(tokenizer, texts) for texts in SPLITS.values()]
    assert sorted(file.path for own in prepared.splits.values() for file in own.files) == sorted(paths)
    assert prepared.has_documents and not list(prepared.folder.glob("*.bin"))
    messages: list[str] = []
    config = DataConfig(source=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    context = PrepareContext(report=messages.append)
    again = prepare_corpus(config, open_corpus(config), PretrainedTokenizer.open(tokenizer), context)
    assert (again.digest, messages) == (prepared.digest, [])
    valid = open_text(config, tmp_path, "valid")
    assert tokens(prepare_corpus(config, valid, PretrainedTokenizer.open(tokenizer), ALONE)) == tokens(prepared)[1:2]


@pytest.mark.parametrize("ending", [".bin", ".idx", ".*"])
def test_shards_of_a_pattern_are_cut_as_one(ending: str, tokenizer: Path, tmp_path: Path) -> None:
    """Megatron's between documents, also at the end of a file."""
    for number in range(4):
        part = DOCUMENTS[number * 75 : (number + 1) * 75]
        write_megatron(tmp_path / f"{number}_text_document", documents_of(tokenizer, part))
    for split in ([0.5, 0.3, 0.2], [0.9, 0.1]):
        found = tokens(prepare(tmp_path / f"*{ending}", tokenizer, tmp_path, split=split))
        assert sum(found, []) == reference(tokenizer)
        assert {own[-1] for own in found} == {2}
        assert [len(own) / len(sum(found, [])) for own in found] == pytest.approx(split, abs=0.01)
    ids = reference(tokenizer)
    for number in range(3):
        write_nanogpt(tmp_path / f"x{number}.bin", ids[number * 1000 : (number + 1) * 1000])
    found = tokens(prepare(tmp_path / "x*.bin", tokenizer, tmp_path, split=[1 / 3, 0.5]))
    assert found == [ids[:1000], ids[1000:2500]]


@pytest.mark.parametrize("layout", ["pattern", "folder"])
@pytest.mark.parametrize("what", ["vanished", "changed"])
def test_a_shard_that_vanished_or_changed_since_is_named(
    what: str, layout: str, tokenizer: Path, tmp_path: Path
) -> None:
    ids, folder = reference(tokenizer), tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        write_nanogpt(folder / f"train_{number}.bin", ids[number * 1000 : (number + 1) * 1000])
    if layout == "folder":
        write_nanogpt(folder / "val.bin", ids[3000:3500])
    source = folder if layout == "folder" else folder / "*.bin"
    prepared = prepare(source, tokenizer, tmp_path, split=[0.5, 0.5])
    if what == "vanished":
        (folder / "train_1.bin").unlink()
    else:
        write_nanogpt(folder / "train_1.bin", ids[:999])
    message = rf"^{folder}/train_1.bin: {what} since {prepared.folder} was prepared; restore it, or remove that folder$"
    with pytest.raises(UserError, match=message):
        prepare(source, tokenizer, tmp_path, split=[0.5, 0.5])


@pytest.mark.parametrize("layout", ["file", "folder"])
def test_a_file_that_is_a_whole_split_may_be_made_anew(layout: str, tokenizer: Path, tmp_path: Path) -> None:
    ids, folder = reference(tokenizer), tmp_path / "data"
    folder.mkdir()
    write_nanogpt(folder / "val.bin", ids[3000:3500])
    source = folder if layout == "folder" else folder / "train.bin"
    for size in (1000, 2000):
        write_nanogpt(folder / "train.bin", ids[:size])
        found = tokens(prepare(source, tokenizer, tmp_path, split=[0.5, 0.5]))
        assert sum(map(len, found)) == size + 500 * (layout == "folder")


@pytest.mark.parametrize("source", ["data", "data/train*"])
def test_a_link_to_a_shard_that_is_away_is_named(source: str, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("train_0", "val"):
        write_nanogpt(tmp_path / "data" / f"{name}.bin", reference(tokenizer)[:1000])
    (tmp_path / "data/train_1.bin").symlink_to(tmp_path / "away")
    with pytest.raises(UserError, match=rf"train_1.bin: a link to {tmp_path}/away, which is not there$"):
        prepare(tmp_path / source, tokenizer, tmp_path, split=[0.5, 0.5])


def test_training_evaluation_and_text(tokenizer: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        ids = reference(tokenizer, SPLITS[split])
        for number in range(3):
            write_nanogpt(tmp_path / f"{split}_{number}.bin", ids[number::3])
    words = ["--preset", "tiny", f"data.source={tmp_path}", f"data.tokenizer={tokenizer}", "data.vocab_size=none"]
    words += [f"data.cache_dir={tmp_path / 'cache'}", f"output_dir={tmp_path / 'run'}", "training.device=cpu"]
    run("hvd-train", *words, "data.sequence_length=16", "training.batch_size=4", "training.max_steps=2")
    found = json.loads(run("hvd-transformer", "evaluate", tmp_path / "run", "--json"))
    assert found["split"] == "valid"
    shown = run("hvd-transformer", "generate", tmp_path / "run", "--prompt", "The cat", "--tokens", 4)
    assert shown.startswith("The cat")


def test_bad_files(tokenizer: Path, tmp_path: Path) -> None:
    def told(source: Path, own: Path | None = tokenizer) -> str:
        with pytest.raises(UserError) as error:
            prepare(source, own, tmp_path)
        assert "\n" not in str(error.value)
        return str(error.value)

    good = documents_of(tokenizer, DOCUMENTS)
    good_file = write_nanogpt(tmp_path / "good.bin", reference(tokenizer))
    assert told(good_file, None).startswith(
        f"data.source={good_file}: has token numbers; name the tokenizer that made them with data.tokenizer="
    )
    large = write_nanogpt(tmp_path / "large.bin", [1] * 70 + [90] * 30)
    assert told(large).startswith(f"{large}: token 70 is 90, but the tokenizer has 90 tokens")
    wide = tmp_path / "wide.bin"
    np.array(reference(tokenizer), np.uint32).tofile(wide)
    assert told(wide).endswith("as nanoGPT's do; this one seems to hold numbers of 32 bits")
    header = tmp_path / "header.bin"
    header.write_bytes(np.array([20240520, 1, 100] + [0] * 253, np.int32).tobytes() + good_file.read_bytes())
    assert told(header).endswith("this one begins with a header")
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"123")
    assert told(odd) == f"{odd}: its size, 3 bytes, is not a multiple of 2 bytes per token"
    prefix = write_megatron(tmp_path / "cut", good)
    index = prefix.with_suffix(".idx")
    data = index.read_bytes()
    index.write_bytes(data[:-1])
    assert told(prefix).startswith(f"{index}: damaged: shorter than its ")
    index.write_bytes(b"x" + data[1:])
    assert told(prefix).startswith(f"{index}: no index of Megatron's token files")
    index.write_bytes(data[:9] + struct.pack("<Q", 2) + data[17:])
    assert told(prefix).startswith(f"{index}: version 2, number format 4; can read version 1 ")
    index.write_bytes(data[:17] + b"\x07" + data[18:])
    assert "number format 7" in told(prefix)
    index.write_bytes(data)
    prefix.with_suffix(".bin").write_bytes(b"1234" * 9)
    assert told(prefix).startswith(f"{index}: describes ")
    prefix.with_suffix(".bin").unlink()
    assert told(prefix) == f"{prefix.with_suffix('.bin')}: cannot be read: No such file or directory"
    (tmp_path / "folder").mkdir()
    write_nanogpt(tmp_path / "folder" / "train.bin", [1, 2, 3])
    assert "none of the valid split; it must hold valid.bin or validation.bin or val.bin, or " in told(
        tmp_path / "folder"
    )
    empty = write_nanogpt(tmp_path / "empty.bin", [])
    assert told(empty) == f"{empty}: the file is empty; it must hold tokens"


def test_bad_shards(tokenizer: Path, tmp_path: Path) -> None:
    def told(source: str) -> str:
        with pytest.raises(UserError) as error:
            prepare(tmp_path / source, tokenizer, tmp_path)
        assert "\n" not in str(error.value)
        return str(error.value).replace(str(tmp_path), "")

    ids = documents_of(tokenizer, DOCUMENTS)
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        write_megatron(tmp_path / name / "0_text_document", ids)
        write_nanogpt(tmp_path / name / "0.bin", reference(tokenizer))
    write_megatron(tmp_path / "a" / "1_text_document", ids, 8, np.uint16)
    assert told("a/*.idx").startswith(
        "/a/1_text_document.bin: its tokens are uint16, those of 0_text_document.bin int32; the files of a split must"
    )
    assert told("a/*") == "/a/0.bin: has no 0.idx beside it, as 0_text_document.bin has"
    write_megatron(tmp_path / "b" / "1_text_sentence", ids)
    assert told("b/*").endswith(
        "b/*: token files that end in _text_document and in _text_sentence; give those of one kind"
    )
    assert "token files, but none of the train split" in told("c")
    write_nanogpt(tmp_path / "c" / "1.bin", [])
    assert told("c/?.bin") == "/c/1.bin: the file is empty; it must hold tokens"
    write_nanogpt(tmp_path / "c" / "1.bin", [1, 2, 90])
    assert told("c/?.bin").startswith("/c/1.bin: token 2 is 90, but the tokenizer has 90 tokens")
    (tmp_path / "c" / "0_text_document.idx").unlink()
    needs = "/c/0_text_document.bin: has no 0_text_document.idx beside it, which Megatron's token files need"
    assert told("c/0_text_document.bin") == told("c/*_document*") == needs
    assert "c/*.idx: no such file; names must end in .txt," in told("c/*.idx")


@pytest.mark.parametrize("split", ["val", "test"])
def test_one_split_of_a_folder_is_evaluated_without_the_others(split: str, tokenizer: Path, tmp_path: Path) -> None:
    ids = reference(tokenizer, SPLITS[split])
    write_nanogpt(tmp_path / f"{split}.bin", ids)
    config = DataConfig(source="other", cache_dir=str(tmp_path / "cache"))
    corpus = open_text(config, tmp_path, None if split == "test" else "valid")
    (found,) = prepare_corpus(config, corpus, PretrainedTokenizer.open(tokenizer), ALONE).splits.values()
    assert found[:].tolist() == ids


def test_a_split_that_is_there_whole_and_in_shards_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    for name in ("train", "train_000", "train_001", "val"):
        write_nanogpt(tmp_path / f"{name}.bin", reference(tokenizer))
    with pytest.raises(UserError, match=r"train: both train.bin and train_000.bin; the same documents may be there"):
        prepare(tmp_path, tokenizer, tmp_path)
    for number in range(2):
        (tmp_path / f"train_00{number}.bin").rename(tmp_path / f"train_small{number}.bin")
    prepare(tmp_path, tokenizer, tmp_path)
