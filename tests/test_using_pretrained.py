"""What was fine-tuned is used by the commands as transformers itself would, and is a Hugging Face folder again."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import command
from conftest import rank_environment
from huggingface import WORDS, write_bert, write_gpt, write_own_family, write_tokenizer
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

SMALL = [
    "data.sequence_length=12", "data.workers=1", "training.device=cpu", "training.batch_size=4", "training.max_steps=6",
    "optimizer.lr=0.003",
]  # fmt: skip
REVIEWS = "label,text\n" + "good,the room was very clean and good\nbad,the room was not clean\n" * 12
TEXT = "the room was very good and the room was not bad\n" * 30
MISSING = "import sys; sys.modules['transformers'] = None; from hvd_transformer.cli.train import main; main()"


def run(program: str, *words: object, code: int = 0) -> str:
    """Standard output; with another exit code than 0, the one line of standard error."""
    return checked(command(program, *words), code)


def checked(result: subprocess.CompletedProcess[str], code: int = 0) -> str:
    assert result.returncode == code, result.stdout + result.stderr
    if code:
        assert result.stderr.count("\n") == 1, result.stderr
        return result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("pretrained")
    write_bert(root / "bert")
    write_gpt(root / "gpt")
    (root / "reviews.csv").write_text(REVIEWS)
    (root / "text.txt").write_text(TEXT)
    return root


def words_of(folder: Path, task: str, model: str, source: str) -> list[str]:
    return [
        f"task={task}", f"model.pretrained={folder / model}", f"data.source={folder / source}",
        f"data.cache_dir={folder / 'cache'}", f"output_dir={folder / task}", *SMALL,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def classifier(folder: Path) -> Path:
    shown = run("hvd-train", *words_of(folder, "classification", "bert", "reviews.csv"))
    assert "new weights: classifier.bias, classifier.weight" in shown
    return folder / "classification"


@pytest.fixture(scope="module")
def language_model(folder: Path) -> Path:
    run("hvd-train", *words_of(folder, "language_model", "gpt", "text.txt"))
    return folder / "language_model"


def test_labels_are_those_of_transformers(classifier: Path, tmp_path: Path) -> None:
    texts = ["the room was good", "bad", "not a very clean room and not a very good room and a bad room"]
    exported = tmp_path / "exported"
    run("hvd-transformer", "export", classifier, exported)
    for place in (classifier, exported):
        words = [word for text in (*texts, "") for word in ("--text", text)]
        found = [json.loads(line) for line in run("hvd-transformer", "classify", place, *words).splitlines()]
        assert found[-1]["label"] is None
        tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(exported).eval()
        for text, own in zip(texts, found, strict=False):
            inputs = tokenizer(text, truncation=True, max_length=12, return_tensors="pt")
            wanted = model(**inputs).logits.softmax(-1)[0]
            assert list(own["probabilities"]) == ["bad", "good"]
            assert list(own["probabilities"].values()) == pytest.approx(wanted.tolist(), abs=2e-6)
            assert own["label"] == model.config.id2label[int(wanted.argmax())]


def test_a_text_goes_on_as_with_transformers(language_model: Path, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    run("hvd-transformer", "export", language_model, exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    prompts = tmp_path / "prompts.txt"
    texts = ["the room was", "a", "very good and not bad"]
    prompts.write_text("".join(f"{text}\n" for text in texts))
    for place in (language_model, exported):
        words = ["generate", place, "--temperature", 0, "--tokens", 9, "--file", prompts, "--json"]
        found = [json.loads(line)["text"] for line in run("hvd-transformer", *words).splitlines()]
        for text, own in zip(texts, found, strict=True):
            inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
            wanted = model.generate(
                input_ids=inputs["input_ids"], max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=None
            )
            assert own == tokenizer.decode(wanted[0])
    message = run("hvd-transformer", "generate", language_model, "--prompt", "a " * 24, code=2)
    assert "24 tokens; the model has 24 positions" in message


def test_training_goes_on_from_its_own_checkpoint(folder: Path, classifier: Path) -> None:
    """Not from the folder that it began with."""
    words = [*words_of(folder, "classification", "bert", "reviews.csv"), "training.max_steps=8", "training.epochs=2"]
    assert "resuming from" in run("hvd-train", *words)
    assert json.loads((classifier / "summary.json").read_text())["steps"] == 8


def test_an_exported_folder_is_fine_tuned_again(folder: Path, classifier: Path, tmp_path: Path) -> None:
    run("hvd-transformer", "export", classifier, tmp_path / "exported")
    words = [*words_of(folder, "classification", "bert", "reviews.csv"), f"output_dir={tmp_path / 'again'}"]
    shown = run("hvd-train", *words, f"model.pretrained={tmp_path / 'exported'}")
    assert "no new weights" in shown


def test_a_model_without_its_head_labels_nothing(classifier: Path, tmp_path: Path) -> None:
    run("hvd-transformer", "export", classifier, tmp_path / "exported")
    file = tmp_path / "exported" / "model.safetensors"
    weights = load_file(file)
    del weights["classifier.weight"]
    save_file(weights, file, {"format": "pt"})
    message = run("hvd-transformer", "classify", tmp_path / "exported", "--text", "good", code=2)
    assert message.endswith("classifier.weight is in the model but not in the file\n")


def test_a_head_that_knows_the_labels_keeps_their_order(folder: Path, tmp_path: Path) -> None:
    """Its numbers are not those of the sorted names."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / "bert", id2label={0: "good", 1: "bad"}, label2id={"good": 0, "bad": 1}
    )
    shutil.copytree(folder / "bert", tmp_path / "own")
    model.save_pretrained(tmp_path / "own")
    words = [*words_of(folder, "classification", "bert", "reviews.csv"), f"output_dir={tmp_path / 'run'}"]
    shown = run("hvd-train", *words, f"model.pretrained={tmp_path / 'own'}", "optimizer.lr=1e-9")
    assert "(good " in shown
    assert "no new weights" in shown
    (found,) = run("hvd-transformer", "classify", tmp_path / "run", "--text", "the room was bad").splitlines()
    inputs = transformers.AutoTokenizer.from_pretrained(folder / "bert")("the room was bad", return_tensors="pt")
    wanted = model.eval()(**inputs).logits.softmax(-1)[0].tolist()
    assert json.loads(found)["probabilities"] == pytest.approx({"good": wanted[0], "bad": wanted[1]}, abs=1e-5)


def test_evaluate_needs_the_checkpoint_alone(folder: Path, classifier: Path) -> None:
    """Not the folder that training began with."""
    shutil.move(folder / "bert", folder / "away")
    try:
        found = json.loads(run("hvd-transformer", "evaluate", classifier, "--json"))
    finally:
        shutil.move(folder / "away", folder / "bert")
    summary = json.loads((classifier / "summary.json").read_text())
    assert {f"test_{name}": value for name, value in found["metrics"].items()}.items() <= summary.items()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.pretrained=nothing"], "must be a folder with config.json, model.safetensors and a tokenizer"),
        (["model.num_layers=2"], "model.num_layers=2: not with model.pretrained="),
        (["data.tokenizer=char"], "data.tokenizer=char: not with model.pretrained="),
        (["parallel.pipeline=2"], "which only supports data parallelism; leave it at 1"),
        (["task=translation"], "a bert, not a model that translates: must be Marian, M2M100 or NLLB"),
        (["data.sequence_length=17"], "data.sequence_length=17: longer than model.pretrained="),
        (["data.too_long=error", "data.sequence_length=5"], "reviews.csv, line 2: 9 tokens, more than"),
    ],
)
def test_wrong_settings_get_one_line(folder: Path, tmp_path: Path, words: list[str], message: str) -> None:
    common = words_of(folder, "classification", "bert", "reviews.csv")
    assert message in run("hvd-train", *common, f"output_dir={tmp_path / 'run'}", *words, code=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_same", [True, False])
def test_a_tied_llama_may_have_its_output_layer_again_if_it_is_the_same(
    folder: Path, tmp_path: Path, is_same: bool
) -> None:
    """transformers computes with another one, whatever config.json says."""
    tied = write_own_family(tmp_path / "tied", "llama-biased")
    weights = load_file(tied / "model.safetensors")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + (0 if is_same else 1)
    save_file(weights, tied / "model.safetensors", {"format": "pt"})
    words = [*words_of(folder, "language_model", "bert", "text.txt"), f"model.pretrained={tied}"]
    words += [f"output_dir={tmp_path / 'run'}", "training.max_steps=1"]
    told = run("hvd-train", *words, code=0 if is_same else 2)
    if not is_same:
        assert "lm_head.weight is not model.embed_tokens.weight, although its config.json says tie_word_emb" in told


def test_a_model_in_one_file_counts_before_the_index_of_old_shards(folder: Path, tmp_path: Path) -> None:
    """transformers leaves the index when a smaller model is saved into the same folder."""
    one = write_own_family(tmp_path / "one", "llama")
    names = load_file(one / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (one / "model.safetensors.index.json").write_text(json.dumps(index))
    words = [*words_of(folder, "language_model", "bert", "text.txt"), f"model.pretrained={one}"]
    run("hvd-train", *words, f"output_dir={tmp_path / 'run'}", "training.max_steps=1")


@pytest.mark.parametrize("ends", [7, [7, 8]])
def test_a_text_of_own_blocks_ends_where_the_folder_says(folder: Path, tmp_path: Path, ends: object) -> None:
    """Beside the end token of the tokenizer."""
    own = write_own_family(tmp_path / "own", "llama")
    words = [*words_of(folder, "language_model", "bert", "text.txt"), f"model.pretrained={own}"]
    words += ["training.max_steps=1", "optimizer.lr=1e-12"]
    sample = ["generate", "--prompt", "a", "--temperature", 5, "--tokens", 40, "--json"]
    run("hvd-train", *words, f"output_dir={tmp_path / 'endless'}")
    whole = json.loads(run("hvd-transformer", *sample, tmp_path / "endless"))["text"].split()
    (own / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    run("hvd-train", *words, f"output_dir={tmp_path / 'run'}")
    run("hvd-transformer", "export", tmp_path / "run", tmp_path / "exported")
    last = [WORDS[number - 5] for number in (ends if isinstance(ends, list) else [ends])]
    wanted = whole[: min(place for place, word in enumerate(whole) if word in last and place > 0)]
    for place in (tmp_path / "run", tmp_path / "exported"):
        assert json.loads(run("hvd-transformer", *sample, place))["text"].split() == wanted


def test_an_exported_mixture_of_experts_has_the_weights_of_its_family(folder: Path, tmp_path: Path) -> None:
    """Version 5 of transformers joins the experts in its modules; other programs know the names of the folder."""
    write_tokenizer(tmp_path / "moe")
    config = transformers.Qwen3MoeConfig(
        vocab_size=5 + len(WORDS), hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=2, num_experts_per_tok=1,
        max_position_embeddings=32,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    words = [*words_of(folder, "language_model", "bert", "text.txt"), f"model.pretrained={tmp_path / 'moe'}"]
    run("hvd-train", *words, f"output_dir={tmp_path / 'run'}", "training.max_steps=1", "optimizer.lr=1e-12")
    run("hvd-transformer", "export", tmp_path / "run", tmp_path / "exported")
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("moe", "exported"))
    assert any(".experts.1." in name for name in theirs)
    assert sorted(theirs) == sorted(ours)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-6)


def test_a_model_of_another_kind_gets_one_line(folder: Path, tmp_path: Path) -> None:
    words = [*words_of(folder, "language_model", "bert", "text.txt"), f"output_dir={tmp_path / 'run'}"]
    assert "no causal language model: BertLMHeadModel lacks cls" in run("hvd-train", *words, code=2)
    damaged = tmp_path / "damaged"
    write_tokenizer(damaged)
    (damaged / "config.json").write_text("{}")
    assert f"model.pretrained={damaged}: cannot be read" in run(
        "hvd-train", *words, f"model.pretrained={damaged}", code=2
    )


@pytest.mark.parametrize(
    ("family", "task", "data", "kind", "known"),
    [
        ("vit", "language_model", "text.txt", "causal language model", "llama, qwen3, gpt2, "),
        ("vit", "classification", "reviews.csv", "classifier", ", bert, roberta, "),
        ("of tomorrow", "language_model", "text.txt", "causal language model", "llama, qwen3, gpt2, "),
    ],
)
def test_a_family_that_is_not_supported_is_told_those_that_are(
    folder: Path, tmp_path: Path, family: str, task: str, data: str, kind: str, known: str
) -> None:
    other = tmp_path / "other"
    write_tokenizer(other)
    (other / "config.json").write_text(json.dumps({"model_type": family}))
    words = [*words_of(folder, task, "bert", data), f"output_dir={tmp_path / 'run'}", f"model.pretrained={other}"]
    told = run("hvd-train", *words, code=2)
    assert f"model_type={family} in its config.json: transformers has no {kind} of this family; " in told
    assert known in told and len(told.splitlines()) == 1
    (other / "tokenizer.json").unlink()  # nor is its tokenizer looked at, or data prepared
    assert run("hvd-train", *words, f"data.cache_dir={tmp_path / 'cache'}", code=2) == told
    assert not (tmp_path / "cache").exists()


def test_without_transformers_the_way_to_install_it_is_told(folder: Path) -> None:
    program = [sys.executable, "-c", MISSING, *words_of(folder, "classification", "bert", "reviews.csv")]
    done = subprocess.run(program, env=rank_environment(), capture_output=True, text=True, timeout=200)
    message = checked(done, code=2)
    assert "needs transformers; install it with: pip install 'hvd-transformer[pretrained]'" in message


def test_weights_are_kept_in_half_the_bytes_never(language_model: Path) -> None:
    """A folder in bfloat16 is trained in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(language_model / "checkpoints" / "latest")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
