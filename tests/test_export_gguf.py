"""`export --format gguf`: transformers' reader of llama.cpp's files finds the same model and the same token numbers."""

import json
from pathlib import Path

import pytest
import torch
from commands import output as run

from hvd_transformer.cli import export
from hvd_transformer.data.as_gguf_tokenizer import add_tokenizer
from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer
from hvd_transformer.data.tokenizers import BPETokenizer
from hvd_transformer.inference.export import FORMATS
from hvd_transformer.inference.trained_model import load_trained

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

TEXT = "The cat's (big, red) hat sat on my rug!\nIs the rug; the cat: “fine”?  Äh, no… 1234 hats.\n\n" * 60
SETTINGS = [
    "--preset", "llama-tiny", "data.vocab_size=300", "model.num_layers=2", "model.d_model=32", "data.workers=1",
    "data.sequence_length=32", "training.device=cpu", "training.batch_size=4", "training.text_samples=0",
    "training.max_steps=12", "optimizer.warmup_steps=0",
]  # fmt: skip
ROPE = "{rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 16}"
CASES = {"tied": [], "untied, RoPE scaling": ["model.tie_embeddings=false", f"model.rope_scaling={ROPE}"]}


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run and its export."""
    root = tmp_path_factory.mktemp("gguf")
    (root / "text.txt").write_text(TEXT, encoding="utf-8")
    folders = [f"data.source={root / 'text.txt'}", f"data.cache_dir={root}", f"output_dir={root / 'run'}"]
    run("hvd-train", *SETTINGS, *folders, *CASES[request.param])
    run("hvd-transformer", "export", root / "run", root / "exported", "--format", "gguf")
    return root


@torch.no_grad()
def test_its_logits_are_ours(folder: Path) -> None:
    """The reader puts the rows of queries and keys back, and leaves out the factors of scaled rotations."""
    trained = load_trained(folder / "run", "language_model")
    file = folder / "exported" / "model.gguf"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).eval()
    assert theirs.config.num_key_value_heads == 2
    if (scaling := trained.config.rope_scaling) is not None:
        given = {**scaling, "rope_theta": trained.config.rope_theta}
        config = transformers.LlamaConfig(**{**theirs.config.to_dict(), "rope_parameters": given})
        scaled = transformers.LlamaForCausalLM(config).eval()
        scaled.load_state_dict(theirs.state_dict())
        (factors,) = (tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "rope_freqs.weight")
        plain = theirs.model.rotary_emb.inv_freq
        assert torch.allclose(plain / torch.tensor(factors.data), scaled.model.rotary_emb.inv_freq)
        theirs = scaled
    tokens = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(1))
    assert torch.allclose(theirs(input_ids=tokens).logits, trained.model(tokens), atol=1e-5)


def test_its_tokens_are_ours(folder: Path) -> None:
    ours = load_trained(folder / "run", "language_model").tokenizers["text"]
    theirs = transformers.AutoTokenizer.from_pretrained(folder / "exported", gguf_file="model.gguf")
    for text in (TEXT, "the cat's hat", "A \t newline\n\n and \x1c µ unknown ☃", "a   b"):
        found = theirs(text, add_special_tokens=False)["input_ids"]
        assert found == ours.encode(text).tolist()
        assert theirs.decode(found) == text
    fields = gguf.GGUFReader(folder / "exported" / "model.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert fields["tokenizer.ggml.tokens"].contents()[0] == "<unk>"
    assert not fields["tokenizer.ggml.add_bos_token"].contents()


def test_a_tuned_model_keeps_its_special_tokens_and_its_chat_template(tmp_path: Path) -> None:
    ours = BPETokenizer.train([TEXT], 300, 1)
    special = {"<s>": 300, "<pad>": 301}
    model = json.loads(ours.json_text)
    model["added_tokens"] += [{"id": number, "content": token, "special": True, "single_word": False, "lstrip": False,
                               "rstrip": False, "normalized": False} for token, number in special.items()]  # fmt: skip
    config = {"bos_token": "<s>", "eos_token": "<pad>", "pad_token": "<pad>", "chat_template": "{{ messages }}"}
    files = {"tokenizer.json": json.dumps(model), "tokenizer_config.json": json.dumps(config)}
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    add_tokenizer(writer, PretrainedTokenizer(files), 302)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    found = {name: fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("bos", "eos", "padding")}
    assert found == {"bos": 300, "eos": 301, "padding": 301}
    assert fields["tokenizer.chat_template"].contents() == "{{ messages }}"


def test_the_command_offers_every_format() -> None:
    assert tuple(FORMATS) == export.FORMATS


def test_what_is_no_llama_gets_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    folders = [f"data.source={tmp_path / 'text.txt'}", f"data.cache_dir={tmp_path}"]
    for number, (words, message) in enumerate(
        [
            (["--preset", "tiny"], "model.norm_type=layer: only a Llama, which has norm_type=rms"),
            ([*SETTINGS, "model.qk_norm=true"], "model.qk_norm=True: only a Llama, which has qk_norm=false"),
            ([*SETTINGS, "data.tokenizer=char", "data.vocab_size=none"], "data.tokenizer=char: only byte-level BPE"),
        ]
    ):
        run_folder, exported = tmp_path / f"run{number}", tmp_path / "exported"
        more = [f"output_dir={run_folder}", "training.max_steps=1", "data.sequence_length=16", "data.workers=1"]
        run("hvd-train", *words, *folders, *more)
        told = run("hvd-transformer", "export", run_folder, exported, "--format", "gguf", code=2)
        assert told == f"hvd-transformer: --format gguf: {message}\n"
        assert not exported.exists()
