"""The benchmark of prepared documents: its documents, what it finds wrong, and that it runs to its end."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click import ClickException
from conftest import REPOSITORY
from tokenizers import Tokenizer

from benchmarks.documents.corpus import END, documents, write_corpus, write_tokenizer
from benchmarks.documents.ours import Preparation
from benchmarks.documents.watched import watch


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("documents")
    return write_corpus(folder, 0.5, 0.25)


def test_documents_are_the_same_again_and_obey_zipfs_law(shards: list[Path], tmp_path: Path) -> None:
    again = write_corpus(tmp_path, 0.5, 0.25)
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in shards]
    assert len(shards) == 2 and shards[0].read_bytes()[:1000] != shards[1].read_bytes()[:1000]
    assert all(0.25e6 <= file.stat().st_size < 1.5e6 for file in shards)
    words = [word.strip(",.") for text in documents(shards) for word in text.split()]
    counts = np.sort(np.unique(np.array([word for word in words if word]), return_counts=True)[1])[::-1]
    # Zipf–Mandelbrot: the word of rank r has a share in proportion to 1 / (r + 2.7); the two marks are the first ranks.
    assert counts[0] / counts[97] == pytest.approx((99 + 2.7) / (2 + 2.7), rel=0.25)


def test_a_kept_file_is_not_written_again(tmp_path: Path) -> None:
    first = write_corpus(tmp_path, 0.1, 0.1)[0]
    first.write_bytes(b'{"text": "mine"}\n')
    assert list(documents(write_corpus(tmp_path, 0.1, 0.1))) == ["mine"]


@pytest.fixture
def prepared(shards: list[Path], tmp_path: Path) -> tuple[Preparation, list[int]]:
    """A finished preparation, whose tokens are made here."""
    preparation = Preparation(
        shards[0].parent, write_tokenizer(tmp_path / "bpe", shards[0], 400, 0.1), tmp_path / "cache"
    )
    model = Tokenizer.from_file(str(preparation.tokenizer / "tokenizer.json"))
    tokens = [number for text in documents(shards) for number in (*model.encode(text).ids, model.token_to_id(END))]
    (tmp_path / "cache" / "prepared" / "data").mkdir(parents=True)
    (tmp_path / "cache" / "prepared" / "data" / "train.bin").write_bytes(np.array(tokens, "<u2").tobytes())
    return preparation, tokens


def test_right_tokens_pass(prepared: tuple[Preparation, list[int]], shards: list[Path]) -> None:
    preparation, tokens = prepared
    for place in (0, len(tokens) // 2, len(tokens)):
        assert preparation.check(shards, place) == len(list(documents(shards)))


@pytest.mark.parametrize("place", ["middle", "end"])
def test_another_token_is_found(prepared: tuple[Preparation, list[int]], shards: list[Path], place: str) -> None:
    preparation, tokens = prepared
    wrong = len(tokens) // 2 if place == "middle" else len(tokens) - 5
    wrong += tokens[wrong] == 0
    tokens[wrong] = 1 + tokens[wrong] % 200
    preparation.tokens.write_bytes(np.array(tokens, "<u2").tobytes())
    with pytest.raises(ClickException, match="are others"):
        preparation.check(shards, len(tokens) // 2)


def test_a_lost_document_is_found(prepared: tuple[Preparation, list[int]], shards: list[Path]) -> None:
    preparation, tokens = prepared
    preparation.tokens.write_bytes(np.array(tokens[tokens.index(0) + 1 :], "<u2").tobytes())
    with pytest.raises(ClickException, match="ends of"):
        preparation.check(shards, 0)


def test_memory_is_that_of_all_processes(tmp_path: Path) -> None:
    child = "data = b'x' * 50_000_000; import time; time.sleep(1.5)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert 50e6 < watch([sys.executable, "-c", parent], {}).memory < 100e6


def test_a_kill_ends_all_processes(tmp_path: Path) -> None:
    file = tmp_path / "alive"
    child = (
        f"import time, pathlib\nwhile True: pathlib.Path({str(file)!r}).write_text(str(time.time())); time.sleep(.01)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    watch([sys.executable, "-c", parent], {}, kill_when=file.exists)
    before = file.read_text()
    with pytest.raises(ClickException, match="exit code 3"):
        watch([sys.executable, "-c", "import time; time.sleep(0.1); raise SystemExit(3)"], {})
    assert file.read_text() == before
    with pytest.raises(ClickException, match="ended before"):
        watch([sys.executable, "-c", ""], {}, kill_when=lambda: False)


@pytest.mark.slow
def test_it_kills_resumes_and_reports(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.documents", "--gigabytes", "0.02", "--shard-megabytes", "10"]
    command += ["--folder", str(tmp_path), "--json", str(file)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    figures = json.loads(file.read_text())
    assert 0 <= figures["kept"] <= figures["written"] < figures["tokens"] and not figures["beside"]
    assert figures["documents"] == len(list(documents(sorted(tmp_path.glob("documents-*/train-*")))))
    assert "left out without --peer-python" in result.stdout
