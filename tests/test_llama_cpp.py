"""llama.cpp reads what `export --format gguf` writes, and finds the same perplexity.

Its Python package is compiled when pip installs it, so it is no part of dev: `pip install llama-cpp-python`.
"""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from commands import output as run
from conftest import REPOSITORY

WINDOW = 128  # sequence_length of the preset
SETTINGS = [
    "--preset", "llama-tiny", "data.vocab_size=1024", "data.workers=1", "training.device=cpu",
    "training.max_steps=300", "training.text_samples=0", "optimizer.warmup_steps=20",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_its_perplexity_is_ours(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    pages = [path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "docs").rglob("*.md"))]
    valid = "".join(pages[-4:])
    (tmp_path / "text").mkdir()
    for name, text in (("train", "".join(pages[:-4])), ("valid", valid), ("test", valid)):
        (tmp_path / "text" / f"{name}.txt").write_text(text, encoding="utf-8")
    folders = [f"data.source={tmp_path / 'text'}", f"data.cache_dir={tmp_path}", f"output_dir={tmp_path / 'run'}"]
    run("hvd-train", *SETTINGS, *folders)
    run("hvd-transformer", "export", tmp_path / "run", tmp_path / "exported", "--format", "gguf")
    shown = run("hvd-transformer", "evaluate", tmp_path / "run", "--split", "valid", "--json")
    evaluated = json.loads(shown)
    ours = math.exp(evaluated["metrics"]["loss"])

    file = tmp_path / "exported" / "model.gguf"
    model = llama_cpp.Llama(str(file), n_ctx=WINDOW, n_batch=WINDOW, n_threads=1, logits_all=True, verbose=False)
    tokens = torch.tensor(model.tokenize(valid.encode(), add_bos=False, special=False))
    total = 0.0
    for start in range(0, len(tokens) - 1, WINDOW):
        window = tokens[start : start + WINDOW + 1]
        model.reset()
        model.eval(window[:-1].tolist())
        logits = torch.tensor(model.scores[: len(window) - 1], dtype=torch.float64)
        total += float(F.cross_entropy(logits, window[1:], reduction="sum"))
    theirs = math.exp(total / (len(tokens) - 1))
    print(f"{len(tokens)} tokens: perplexity {ours:.4f}, of llama.cpp {theirs:.4f}")
    assert len(tokens) - 1 == evaluated["count"] > 2000
    assert ours < 0.5 * 1024  # it has learned
    assert theirs == pytest.approx(ours, rel=1e-3)
