"""Instruction tuning and LoRA by the commands: train, evaluate, generate, export, and what is refused in one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from chats import CHANGING, MARKED, conversations, write_chat_model, write_conversations
from commands import command, output
from safetensors.torch import load_file, save_file

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LORA = ["model.lora_rank=4", "model.lora_targets=all-linear", "parallel.recompute=always"]
# By name of the run: the model, and more settings. A Llama is trained in our own blocks, but not by LoRA.
RUNS = {"own": ("llama", []), "lora": ("llama", LORA), "whole": ("gpt", [])}
PROMPT = "was the room good"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("chats")
    write_chat_model(found / "gpt")
    generation = write_chat_model(found / "llama", MARKED, "llama") / "generation_config.json"
    generation.write_text(json.dumps({**json.loads(generation.read_text()), "do_sample": True, "temperature": 0.6}))
    for split, number in {"train": 24, "valid": 5, "test": 6}.items():
        write_conversations(found / "data" / f"{split}.jsonl", conversations(number, number))
    return found


def settings(root: Path, model: str) -> list[str]:
    return [
        f"model.pretrained={root / model}", f"data.source={root / 'data'}", "data.messages_column=messages",
        f"data.cache_dir={root / 'cache'}", "data.sequence_length=60", "data.workers=1", "training.device=cpu",
        "training.batch_size=4", "training.max_steps=4", "optimizer.lr=0.02", "training.text_samples=2",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Path]:
    for name, (model, more) in RUNS.items():
        output("hvd-train", *settings(root, model), *more, f"output_dir={root / name}")
    return {name: root / name for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_evaluate_and_generate(runs: dict[str, Path], root: Path, name: str) -> None:
    run = runs[name]
    found = json.loads(output("hvd-transformer", "evaluate", run, "--json"))["metrics"]
    summary = json.loads((run / "summary.json").read_text())
    assert found["loss"] == pytest.approx(summary["test_loss"], rel=1e-6)
    if name == "whole":
        same = output("hvd-transformer", "evaluate", run, "--json", "--data", root / "data" / "test.jsonl")
        assert json.loads(same)["metrics"] == found
    words = ["--chat", "--prompt", PROMPT, "--temperature", "0", "--tokens", "6", "--json"]
    answer = json.loads(output("hvd-transformer", "generate", run, *words))
    output("hvd-transformer", "export", run, run / "exported")
    assert json.loads(output("hvd-transformer", "generate", run / "exported", *words)) == answer
    first = json.loads((run / "samples.jsonl").read_text().splitlines()[0])["samples"][0]
    assert first["prompt"].endswith("<|im_start|>assistant\n")
    assert first["reference"] in (root / "data" / "valid.jsonl").read_text()


def test_generate_takes_the_chat_template(runs: dict[str, Path]) -> None:
    """Greedily as transformers does with the checkpoint's folder."""
    folder = runs["whole"] / "checkpoints" / "best"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": PROMPT}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, inputs["input_ids"].size(1) :]
    words = ["--chat", "--prompt", PROMPT, "--temperature", "0", "--tokens", "6", "--json"]
    answer = json.loads(output("hvd-transformer", "generate", runs["whole"], *words))["answer"]
    assert answer == tokenizer.decode([token for token in ids.tolist() if token != tokenizer.eos_token_id])


@pytest.mark.parametrize(("model", "kind"), [("llama", []), ("gpt", []), ("gpt", LORA)], ids=["own", "whole", "lora"])
def test_an_answer_ends_where_its_turn_does(model: str, kind: list[str], tmp_path: Path) -> None:
    """Base models bring a chat template whose messages end with another token than a text: as Qwen's."""
    folder = write_chat_model(tmp_path / "base", MARKED, model, "<|endoftext|>")
    chat = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "good"}]
    for split in ("train", "valid"):
        write_conversations(tmp_path / f"{split}.jsonl", [chat] * 8)
    words = [f"data.source={tmp_path}", "data.messages_column=messages"]
    words += [f"data.cache_dir={tmp_path / 'cache'}", "data.workers=1", "training.device=cpu"]
    words += [
        "data.sequence_length=60",
        "training.epochs=60",
        "training.batch_size=8",
        "optimizer.lr=0.02",
        "training.text_samples=1",
    ]
    if kind:  # adapters alone teach random weights nothing
        output("hvd-train", *words, f"model.pretrained={folder}", f"output_dir={tmp_path / 'before'}")
        output("hvd-transformer", "export", tmp_path / "before", tmp_path / "tuned")
        (tmp_path / "tuned" / "generation_config.json").unlink()
        folder, kind = tmp_path / "tuned", [*kind, "optimizer.lr=1e-4", "training.epochs=2"]
    output("hvd-train", *words, f"model.pretrained={folder}", *kind, f"output_dir={tmp_path / 'run'}")
    last = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[-1])["samples"][0]
    assert last["answer"] == "good"
    output("hvd-transformer", "export", tmp_path / "run", tmp_path / "native")
    exported, more = tmp_path / "native", ["--format", "transformers"] if model == "llama" else ["--merge"]
    if model == "llama" or kind:
        exported = tmp_path / "theirs"
        output("hvd-transformer", "export", tmp_path / "run", exported, *more)
    words = ["--chat", "--prompt", PROMPT, "--temperature", "0", "--tokens", "20", "--json"]
    for trained in (tmp_path / "run", tmp_path / "native", exported):
        assert json.loads(output("hvd-transformer", "generate", trained, *words))["answer"] == "good"
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    inputs = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    found = theirs.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert tokenizer.decode(found[0, inputs["input_ids"].size(1) :]) == "good<|im_end|>"
    if kind:  # of the adapters alone, which belong to these weights
        weights = load_file(folder / "model.safetensors")
        save_file(
            {name: weight * 1.01 for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"}
        )
        run = tmp_path / "run"
        for command in (
            ["generate", run, *words],
            ["evaluate", run, "--split", "valid"],
            ["export", run, "x", "--merge"],
        ):
            said = output("hvd-transformer", *command, code=2)
            assert f"{folder}: is not the model that the checkpoint's adapters were trained on; was it changed?" in said


def test_adapters_are_peft_s_and_can_be_merged(runs: dict[str, Path], root: Path) -> None:
    adapters, merged = root / "adapters", root / "merged"
    output("hvd-transformer", "export", runs["lora"], adapters)
    output("hvd-transformer", "export", runs["lora"], merged, "--merge")
    ids = torch.tensor([[5, 9, 14, 200, 31]])
    base = transformers.AutoModelForCausalLM.from_pretrained(root / "llama")
    before = base(ids).logits
    adapted = peft.PeftModel.from_pretrained(base, adapters)
    assert adapted.peft_config["default"].r == 4
    assert not {"config.json", "model.safetensors"} & {path.name for path in adapters.iterdir()}
    assert len({path.stat().st_mode for folder in (adapters, merged) for path in folder.iterdir()}) == 1
    after = adapted(ids).logits
    assert float((after - before).detach().abs().max()) > 1e-2
    whole = transformers.AutoModelForCausalLM.from_pretrained(merged)
    torch.testing.assert_close(whole(ids).logits, after, atol=1e-5, rtol=1e-5)
    by_transformers = transformers.AutoModelForCausalLM.from_pretrained(adapters)
    torch.testing.assert_close(by_transformers(ids).logits, after, atol=1e-5, rtol=1e-5)
    words = ["--chat", "--prompt", PROMPT, "--temperature", "0", "--tokens", "6", "--json"]
    answers = [output("hvd-transformer", "generate", folder, *words) for folder in (adapters, merged, runs["lora"])]
    assert len(set(answers)) == 1
    again = output("hvd-transformer", "export", adapters, root / "merged-later", "--merge")
    assert again.strip() == str(root / "merged-later")
    assert "has no adapters" in output("hvd-transformer", "export", runs["whole"], root / "none", "--merge", code=2)


@pytest.mark.parametrize(("name", "form"), [("own", ["--format", "transformers"]), ("lora", ["--merge"])])
def test_exports_generate_as_the_folder_says(
    runs: dict[str, Path], root: Path, tmp_path: Path, name: str, form: list[str]
) -> None:
    output("hvd-transformer", "export", runs[name], tmp_path / "native")
    output("hvd-transformer", "export", runs[name], tmp_path / "theirs", *form)
    if name == "own":  # also by way of our own format
        output("hvd-transformer", "export", tmp_path / "native", tmp_path / "again", *form)
    for folder in [tmp_path / "theirs", *([tmp_path / "again"] if name == "own" else [])]:
        generation = transformers.GenerationConfig.from_pretrained(folder)
        assert (generation.do_sample, generation.temperature) == (True, 0.6)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        config = transformers.AutoConfig.from_pretrained(folder)
        assert tokenizer.pad_token_id is not None and tokenizer.eos_token_id == config.eos_token_id
        if name == "own":
            assert config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize(
    ("model", "words", "message"),
    [
        ("gpt", ["model.pretrained=none"], "data.messages_column=messages: needs model.pretrained"),
        ("gpt", ["data.messages_column=chat"], "data.messages_column=chat: "),
        ("gpt", ["data.batching=columns"], "data.batching=columns: not with data.messages_column=messages"),
        ("gpt", ["model.lora_targets=[nothing]", "model.lora_rank=2"], "model.lora_targets: model.pretrained="),
        ("gpt", ["model.lora_targets=[lm_head]", "model.lora_rank=2"], "the output layer shares its weights with the"),
        ("gpt", ["model.lora_alpha=2"], "model.lora_alpha=2.0: only with model.lora_rank"),
        ("gpt", ["parallel.recompute=except_last"], "parallel.recompute=except_last: not with model.pretrained="),
        ("llama", ["model.lora_rank=2", "parallel.pipeline=2"], "and model.lora_rank=2, which only supports data"),
    ],
)
def test_wrong_settings_get_one_line(root: Path, tmp_path: Path, model: str, words: list[str], message: str) -> None:
    assert message in output("hvd-train", *settings(root, model), f"output_dir={tmp_path / 'run'}", *words, code=2)
    assert not (tmp_path / "run").exists()


def test_a_conversation_whose_answers_are_cut_off_is_left_out_and_counted(root: Path, tmp_path: Path) -> None:
    ask, answer = {"role": "user", "content": " ".join(["room"] * 60)}, {"role": "assistant", "content": "good"}
    data = write_conversations(tmp_path / "a.jsonl", [*conversations(8), [ask, answer], [ask, answer]])
    words = [*settings(root, "gpt"), f"data.source={data}", "data.split=[0.5,0.5]", "data.too_long=cut"]
    done = command("hvd-train", *words, "training.max_steps=1", "training.text_samples=0", f"output_dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert "empty after the cut" in done.stdout + done.stderr


def test_bad_data_and_templates_get_one_line(root: Path, tmp_path: Path) -> None:
    words = [*settings(root, "gpt"), f"output_dir={tmp_path / 'run'}"]
    broken = write_conversations(tmp_path / "a.jsonl", [*conversations(9), [{"role": "user"}]])
    message = output("hvd-train", *words, f"data.source={broken}", "data.split=[0.7,0.3]", code=2)
    assert f"{broken}, line 10: message 1: has no content" in message
    write_chat_model(tmp_path / "plain", None)
    message = output("hvd-train", *words, f"model.pretrained={tmp_path / 'plain'}", code=2)
    assert "its tokenizer has no chat template" in message
    (tmp_path / "plain" / "chat_template.jinja").write_text(CHANGING)
    message = output("hvd-train", *words, f"model.pretrained={tmp_path / 'plain'}", code=2)
    assert "which tokens are the assistant's is ambiguous" in message and "train.jsonl, line " in message


def test_adapters_belong_to_their_model(runs: dict[str, Path], root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "llama", tmp_path / "kept")
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "llama")
    try:
        model.lm_head.weight.data[3, 3] += 1
        model.save_pretrained(root / "llama")
        more = [*LORA, f"output_dir={runs['lora']}", "training.max_steps=5"]
        message = output("hvd-train", *settings(root, "llama"), *more, code=2)
    finally:
        shutil.copytree(tmp_path / "kept", root / "llama", dirs_exist_ok=True)
    assert "is not the model that the checkpoint's adapters were trained on" in message


def test_without_peft_the_way_to_install_it_is_told(root: Path, tmp_path: Path) -> None:
    words = [*settings(root, "gpt"), "model.lora_rank=2", f"output_dir={tmp_path / 'run'}"]
    done = command("hvd-train", *words, hide=["peft"])
    assert done.returncode == 2
    assert "needs peft; install it with: pip install 'hvd-transformer[lora]'" in done.stderr
