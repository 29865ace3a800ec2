"""`mpirun -np N hvd-transformer prepare`: the ranks share the work, one speaks, the files are the same."""

import subprocess

import pytest
from commands import command
from conftest import BIN, rank_environment

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not (BIN / "mpirun").exists(), reason=f"no mpirun in {BIN}"),
]


def prepare(*words: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    if ranks == 1:
        return command("hvd-transformer", "prepare", *words)
    program = ["mpirun", "--oversubscribe", "-np", str(ranks), BIN / "hvd-transformer", "prepare"]
    return subprocess.run([*program, *words], env=rank_environment(), capture_output=True, text=True, timeout=120)


@pytest.fixture
def corpus(tmp_path):
    """Enough for several pieces."""
    for split, lines in {"train": 120000, "valid": 20000, "test": 2000}.items():
        text = "".join(f"line {number} of the {split} split, être 日本\n" for number in range(lines))
        (tmp_path / f"{split}.txt").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("kind", [pytest.param("basic_english", marks=pytest.mark.slow), "bpe"])
def test_ranks_write_the_same_files(corpus, kind):
    words = (f"data.source={corpus}", f"data.tokenizer={kind}", "data.vocab_size=400")
    alone = prepare(*words, f"data.cache_dir={corpus / 'alone'}", "data.workers=1")
    ranks = prepare(*words, f"data.cache_dir={corpus / 'ranks'}", ranks=3)
    assert (alone.returncode, ranks.returncode) == (0, 0), ranks.stderr
    assert ranks.stdout.count("folder: ") == 1
    files = [
        {path.name: path.read_bytes() for path in next((corpus / name / "prepared").glob("*[!k]")).iterdir()}
        for name in ("alone", "ranks")
    ]
    assert files[0] == files[1]


def test_an_error_of_a_rank_ends_all_with_code_2(corpus):
    size = (corpus / "train.txt").stat().st_size
    with (corpus / "train.txt").open("ab") as file:
        file.write(b"\xff\n")
    words = (f"data.source={corpus}", "data.tokenizer=basic_english", f"data.cache_dir={corpus / 'cache'}")
    result = prepare(*words, ranks=3)
    assert result.returncode == 2
    assert result.stderr.count(f"train.txt: not valid UTF-8 at byte {size} ") == 1
    assert "Traceback" not in result.stderr
