"""Documents, a tokenizer for them, and the files in which they may come."""

import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import zstandard
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

DOCUMENTS = [f"The naïve cat sat on rug {number}!\n\n“Fine”\r\n" + "and so on " * (number % 7) for number in range(300)]
FORMATS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".parquet")


def write(path: Path, texts: Sequence[str | None], column: str = "text") -> Path:
    """A file of documents, in the form that its name tells."""
    path.parent.mkdir(exist_ok=True, parents=True)
    if path.suffix == ".parquet":
        table = pyarrow.table({"id": range(len(texts)), column: pyarrow.array(texts, pyarrow.string())})
        parquet.write_table(table, path, row_group_size=17, compression="zstd")
        return path
    lines = [json.dumps({"id": number, column: text}) + "\n" for number, text in enumerate(texts)]
    path.write_bytes(compressed("".join(lines).encode(), path.suffix))
    return path


def compressed(data: bytes, suffix: str) -> bytes:
    """As two members or frames, if compressed at all."""
    half = len(data) // 2
    if suffix == ".gz":
        return gzip.compress(data[:half]) + gzip.compress(data[half:])
    if suffix == ".zst":
        return b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))
    return data


def write_shards(folder: Path, ending: str, texts: Sequence[str] = DOCUMENTS, number: int = 5, stem: str = "s") -> None:
    """The documents in order as so many files; the last ones are larger."""
    ends = [len(texts) * part**2 // number**2 for part in range(number + 1)]
    for part in range(number):
        write(folder / f"{stem}-{part:05}-of-{number:05}{ending}", texts[ends[part] : ends[part + 1]])


def own_tokenizer(folder: Path) -> Path:
    """Learned by the library alone; its number of the end, 2, is not ours."""
    model = Tokenizer(models.BPE(unk_token="[UNK]"))
    model.pre_tokenizer, model.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    model.train_from_iterator(DOCUMENTS, trainers.BpeTrainer(vocab_size=90, special_tokens=["[UNK]", "[PAD]", "[END]"]))
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[END]"}))
    return folder


def reference(tokenizer: Path, texts: Sequence[str] = DOCUMENTS) -> list[int]:
    """The token numbers of the documents, each followed by the end, by the library alone."""
    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    return [token for text in texts for token in (*library.encode(text, add_special_tokens=False).ids, 2)]


def table_bytes(table: "pyarrow.Table") -> bytes:
    """A Parquet file."""
    file = io.BytesIO()
    parquet.write_table(table, file)
    return file.getvalue()
