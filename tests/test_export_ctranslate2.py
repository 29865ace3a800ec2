"""`export --format ctranslate2`: `ctranslate2.Translator` translates as `translate` does."""

from pathlib import Path

import pytest
import tokenizers
from test_using import SMALL, WORDS, run, sentences

ctranslate2 = pytest.importorskip("ctranslate2")
EXPORT = ["--format", "ctranslate2"]
# As in docs/guide/inference.md: a translation may be empty, and ends before the positions do.
SEARCH = {
    "beam_size": 4, "num_hypotheses": 4, "length_penalty": 0.6, "return_scores": True, "min_decoding_length": 0,
    "max_decoding_length": 31,
}  # fmt: skip


def best(found: object) -> list[str]:
    """By our length penalty, ((5 + n) / 6) ** penalty; CTranslate2 has divided by n ** penalty. Both count the end."""
    lengths = [len(tokens) + 1 for tokens in found.hypotheses]
    scores = [score * (6 * n / (5 + n)) ** 0.6 for score, n in zip(found.scores, lengths, strict=True)]
    return found.hypotheses[scores.index(max(scores))]


def translated(folder: Path, lines: list[str]) -> list[str]:
    source, target = (
        tokenizers.Tokenizer.from_file(str(folder / f"{role}-tokenizer.json")) for role in ("source", "target")
    )
    tokens = [encoding.tokens for encoding in source.encode_batch(lines)]
    found = ctranslate2.Translator(str(folder)).translate_batch(tokens, **SEARCH)
    return [target.decode([target.token_to_id(token) for token in best(one)]).strip() for one in found]


def test_it_translates_as_we_do(tmp_path: Path) -> None:
    """With one vocabulary of byte pairs, by the recipe of the guide."""
    (tmp_path / "pairs").mkdir()
    rows = sentences(400)
    for split, own in (("train", rows[:380]), ("valid", rows[380:])):
        (tmp_path / "pairs" / f"{split}.de").write_text("".join(" ".join(row) + "\n" for row in own))
        targets = (" ".join(WORDS[word] for word in row) for row in own)
        (tmp_path / "pairs" / f"{split}.en").write_text("".join(f"{target}\n" for target in targets))
    words = [f"data.source={tmp_path / 'pairs'}", f"data.cache_dir={tmp_path}", f"output_dir={tmp_path / 'run'}"]
    words += ["data.vocab_size=320", "model.share_embeddings=true", "optimizer.lr=0.004", "optimizer.warmup_steps=40"]
    run("hvd-train", *SMALL, "task=translation", "training.epochs=8", *words)
    run("hvd-transformer", "export", tmp_path / "run", tmp_path / "exported", *EXPORT)
    lines = [" ".join(row) for row in rows[:200]]
    ours = run("hvd-transformer", "translate", tmp_path / "run", text="".join(f"{line}\n" for line in lines))
    theirs = translated(tmp_path / "exported", lines)
    same = sum(one == other for one, other in zip(ours.splitlines(), theirs, strict=True))
    assert same >= 0.98 * len(lines)
    assert len(set(theirs)) > 50
