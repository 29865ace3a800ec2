"""Fine-tuning a Marian or an NLLB: losses, metrics and translations are those of transformers itself."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import output as run
from huggingface import write_gpt, write_marian, write_nllb
from test_using import WORDS, sentences

from hvd_transformer.config.schema import TranslationConfig
from hvd_transformer.data.load_tokenizer import load_tokenizer
from hvd_transformer.data.pair_tokenizer import PairTokenizer
from hvd_transformer.inference.predict import translate_texts

transformers = pytest.importorskip("transformers")

FOLDERS = {"marian": (write_marian, "de", "en"), "nllb": (write_nllb, "deu_Latn", "eng_Latn")}
STEPS, RATE = 5, 0.05
SETTINGS = [
    "task=translation", "data.sequence_length=24", "data.workers=1", "training.device=cpu", "training.batch_size=12",
    f"training.epochs={STEPS}", "training.log_every=1", "optimizer.name=sgd", f"optimizer.lr={RATE}",
    "optimizer.weight_decay=0", "optimizer.clip_norm=none", "optimizer.schedule=constant", "translation.beam=3",
    "training.eval_every=100",
]  # fmt: skip
ROWS = sentences(16)
PAIRS = [(" ".join(row), " ".join(WORDS[word] for word in row)) for row in ROWS]
TRAIN, VALID = PAIRS[:12], PAIRS[12:]  # all training pairs are one batch


@pytest.fixture(scope="module", params=FOLDERS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, the pairs and the run."""
    write, *languages = FOLDERS[request.param]
    root = tmp_path_factory.mktemp(request.param)
    write(root / "model", [text for pair in PAIRS for text in pair] * 3)
    (root / "pairs").mkdir()
    for split, pairs in (("train", TRAIN), ("valid", VALID)):
        for language, texts in zip(languages, zip(*pairs, strict=True), strict=True):
            (root / "pairs" / f"{split}.{language}").write_text("".join(f"{text}\n" for text in texts))
    run("hvd-train", *settings(root, *languages), f"output_dir={root / 'run'}")
    run("hvd-transformer", "export", root / "run", root / "exported")
    return root


def settings(root: Path, source: str, target: str) -> list[str]:
    folders = [f"model.pretrained={root / 'model'}", f"data.source={root / 'pairs'}", f"data.cache_dir={root}"]
    return [*SETTINGS, *folders, f"data.source_language={source}", f"data.target_language={target}"]


def loaded(folder: Path) -> tuple:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer, transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()


def test_losses_are_those_of_a_plain_loop(trained: Path) -> None:
    tokenizer, model = loaded(trained / "model")
    if hasattr(model, "final_logits_bias"):  # a buffer there; here it is trained
        bias = model.final_logits_bias
        del model.final_logits_bias
        model.final_logits_bias = torch.nn.Parameter(bias)
    sources, targets = zip(*TRAIN, strict=True)
    batch = tokenizer(list(sources), text_target=list(targets), padding=True, return_tensors="pt")
    batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], RATE)
    wanted = []
    for _ in range(STEPS):
        loss = model(**batch).loss
        wanted.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    lines = [json.loads(line) for line in (trained / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == pytest.approx(wanted, rel=2e-5)
    assert wanted[-1] < wanted[0]
    _, ours = loaded(trained / "exported")
    for name, weight in model.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], weight, rtol=1e-4, atol=1e-5), name


def test_translations_are_those_of_generate(trained: Path) -> None:
    tokenizer, model = loaded(trained / "exported")
    begin = tokenizer.convert_tokens_to_ids("eng_Latn") if hasattr(tokenizer, "tgt_lang") else None
    wanted = []
    for source, _ in VALID:
        inputs = tokenizer([source], return_tensors="pt")
        limit = min(2 * inputs["input_ids"].size(1) + 10, 31)
        found = model.generate(
            **inputs, num_beams=2, length_penalty=1.5, max_new_tokens=limit, forced_bos_token_id=begin
        )
        wanted.append(tokenizer.decode(found[0], skip_special_tokens=True).strip())
    assert any(wanted)
    (trained / "source.txt").write_text("".join(f"{source}\n" for source, _ in VALID) + "\n")
    words = ["--file", trained / "source.txt", "--beam", 2, "--length-penalty", 1.5, "--batch-size", 1]
    for folder in ("run", "exported"):
        assert run("hvd-transformer", "translate", trained / folder, *words).splitlines() == [*wanted, ""]


def test_metrics_are_those_of_the_translations(trained: Path) -> None:
    from sacrebleu.metrics.chrf import CHRF

    summary = json.loads((trained / "run" / "summary.json").read_text())
    (trained / "valid.txt").write_text("".join(f"{source}\n" for source, _ in VALID))
    shown = run("hvd-transformer", "translate", trained / "run", "--file", trained / "valid.txt").splitlines()
    wanted = CHRF().corpus_score(shown, [[target for _, target in VALID]]).score
    assert summary["valid_chrf"] == pytest.approx(wanted)
    found = json.loads(run("hvd-transformer", "evaluate", trained / "run", "--json"))["metrics"]
    assert found == pytest.approx({name: summary[f"valid_{name}"] for name in found})
    assert {"loss", "bleu", "chrf"} <= found.keys()


@pytest.mark.parametrize("beam", [1, 3])
def test_a_translation_does_not_depend_on_the_others_of_its_batch(trained: Path, beam: int) -> None:
    """Batches differ with the number of ranks. Random weights never end a sentence: its own limit does."""
    tokenizer = load_tokenizer(trained / "run" / "checkpoints" / "latest", "target-")
    assert isinstance(tokenizer, PairTokenizer)
    _, model = loaded(trained / "model")
    model.double()
    sources = [np.array(range(9, 9 + length), np.uint32) for length in (2, 5, 9)]
    limits = [2 * len(own) + 10 for own in sources]

    def translated(own: list[np.ndarray], **more: int) -> list[str]:
        return translate_texts(model, 200, tokenizer, own, TranslationConfig(beam=beam), **more)

    together = translated(sources)
    assert together == [text for own in sources for text in translated([own])]
    assert together == [translated([own], target_length=limit)[0] for own, limit in zip(sources, limits, strict=True)]


def test_wrong_input_gets_one_line(trained: Path, tmp_path: Path) -> None:
    words = [*settings(trained, "de", "en"), f"output_dir={tmp_path / 'run'}"]
    if (trained / "model" / "source.spm").exists():
        write_gpt(tmp_path / "gpt")
        words += [f"model.pretrained={tmp_path / 'gpt'}"]
        message = "a gpt2, not a model that translates: must be Marian, M2M100 or NLLB"
    else:
        message = "data.source_language=de: no language of model.pretrained="
    assert message in run("hvd-train", *words, code=2)
