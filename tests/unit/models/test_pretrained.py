"""Hugging Face folders that do not fit what is to be trained are refused with one line."""

import json
from pathlib import Path

import pytest
import torch
from huggingface import WORDS, write_bert, write_gpt, write_tokenizer
from safetensors.torch import load_file, save_file

from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer
from hvd_transformer.errors import UserError
from hvd_transformer.models import pretrained

transformers = pytest.importorskip("transformers")
SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
VOCABULARY = 5 + len(WORDS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def classifier(folder: Path, **options: object) -> torch.nn.Module:
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **SIZE, **options)
    model = transformers.BertForSequenceClassification(config)
    model.save_pretrained(folder)
    return model


def change(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_a_model_that_sees_what_comes_is_no_language_model(folder: Path) -> None:
    config = transformers.BertConfig(vocab_size=VOCABULARY, **SIZE, initializer_range=0.2)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    with pytest.raises(UserError, match="no causal language model: BertLMHeadModel also attends to later tokens"):
        pretrained.load_language_model(folder)
    change(folder, is_decoder=True)
    assert pretrained.load_language_model(folder)


def test_a_model_without_a_limit_takes_any_length(folder: Path) -> None:
    """XLNet's configuration states a limit of -1."""
    model = transformers.XLNetForSequenceClassification(
        transformers.XLNetConfig(vocab_size=VOCABULARY, d_model=16, n_layer=1, n_head=2, d_inner=24)
    )
    assert pretrained.num_positions(model) is None
    pretrained.check_fits(model, folder, VOCABULARY, 4000)


def test_a_head_keeps_its_numbers(folder: Path) -> None:
    """What the folder calls its classes, and that the head is kept, or new where there are more classes."""
    theirs = classifier(folder, id2label={0: "good", 1: "bad"}, label2id={"good": 0, "bad": 1})
    assert pretrained.label_names(folder) == ["good", "bad"]
    model, new = pretrained.load_classifier(folder, ["good", "bad"], pad=0)
    assert new == []
    assert torch.equal(model.classifier.weight, theirs.classifier.weight)
    _, new = pretrained.load_classifier(folder, ["a", "b", "c"], pad=0)
    assert new == ["classifier.bias", "classifier.weight"]


def test_a_head_without_names_has_none(folder: Path) -> None:
    classifier(folder)
    assert pretrained.label_names(folder) is None


def test_the_padding_is_the_tokenizer_s(folder: Path) -> None:
    """A pooled last token is not one of the padding, whatever the folder says of it."""
    write_gpt(folder.with_name("gpt"))
    model, _ = pretrained.load_classifier(folder.with_name("gpt"), ["a", "b"], pad=0)
    logits = pretrained.ClassLogits(model.eval())
    alone = torch.tensor([[5, 6, 7]])
    beside = torch.tensor([[5, 6, 7, 0, 0], [5, 6, 7, 8, 9]])
    torch.testing.assert_close(logits(alone, alone != 0)[0], logits(beside, beside != 0)[0])


def test_a_backbone_that_is_not_whole_is_refused(folder: Path) -> None:
    write_bert(folder.with_name("bert"))
    file = folder.with_name("bert") / "model.safetensors"
    weights = load_file(file)
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"lacks bert\.encoder\.layer\.1\.output\.dense\.weight"):
        pretrained.load_classifier(file.parent, ["a", "b"], pad=0)


def test_more_tokens_than_the_model_has_are_refused(folder: Path) -> None:
    model = classifier(folder)
    pretrained.check_fits(model, folder, VOCABULARY, 16)
    with pytest.raises(UserError, match=f"its tokenizer has {VOCABULARY + 1} tokens, but its model only {VOCABULARY}"):
        pretrained.check_fits(model, folder, VOCABULARY + 1, 16)
    with pytest.raises(UserError, match=r"data\.sequence_length=17: longer than .*, 16 tokens"):
        pretrained.check_fits(model, folder, VOCABULARY, 17)


def test_positions_behind_the_padding_s(folder: Path) -> None:
    """RoBERTa's: as many as can be used, and no more."""
    config = transformers.RobertaConfig(vocab_size=VOCABULARY, max_position_embeddings=18, pad_token_id=1, **SIZE)
    model = transformers.RobertaForSequenceClassification(config).eval()
    assert pretrained.num_positions(model) == 16
    logits = pretrained.ClassLogits(model)
    tokens = torch.full((1, 16), 5)
    logits(tokens, tokens != 1)
    with pytest.raises((IndexError, RuntimeError)):
        longer = torch.full((1, 17), 5)
        logits(longer, longer != 1)


def test_nothing_is_unpickled(folder: Path) -> None:
    model = classifier(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be read: OSError: .*safetensors"):
        pretrained.load_classifier(folder, ["a", "b"], pad=0)


def test_a_folder_s_own_code_is_not_run(folder: Path) -> None:
    classifier(folder)
    change(folder, model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModel": "own.Model"})
    (folder / "own.py").write_text(f"from pathlib import Path\nPath({str(folder / 'ran')!r}).touch()\n")
    with pytest.raises(UserError, match="model_type=own in its config.json: transformers has no classifier"):
        pretrained.load_classifier(folder, ["a", "b"], pad=0)
    PretrainedTokenizer.read(folder)
    assert not (folder / "ran").exists()


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    classifier(folder)
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(UserError, match="tokenizer"):
        PretrainedTokenizer.read(folder)


SHAPE = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
DOCUMENTS = {
    "GPT2": {"vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24},
    "GPTNeoX": {**SHAPE, "intermediate_size": 24},
    "Mistral": {**SHAPE, "num_key_value_heads": 1, "intermediate_size": 24, "sliding_window": 12},
}


@pytest.mark.parametrize("family", DOCUMENTS)
def test_documents_are_kept_apart(family: str, folder: Path) -> None:
    torch.manual_seed(2)
    config = getattr(transformers, f"{family}Config")(**DOCUMENTS[family], initializer_range=0.3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    pretrained.check_documents(model, folder, 12)
    tokens = torch.randint(1, 20, (2, 12))
    tokens[0, [3, 4]] = tokens[1, 8] = 0
    logits = pretrained.text_logits(model, tokens, 0)
    for row, first, last in ((0, 0, 4), (0, 4, 5), (0, 5, 12), (1, 0, 9), (1, 9, 12)):
        alone = model(input_ids=tokens[row : row + 1, first:last]).logits[0]
        torch.testing.assert_close(logits[row, first:last], alone, rtol=1e-4, atol=1e-5)
    changed = tokens.clone()
    changed[0, 6] = 1 + changed[0, 6] % 19
    after = pretrained.text_logits(model, changed, 0)
    assert torch.equal(after[0, :5], logits[0, :5]) and torch.equal(after[1], logits[1])
    assert not torch.equal(after[0, 6:], logits[0, 6:])


def test_models_without_positions_or_with_a_window_cannot_keep_documents_apart(folder: Path) -> None:
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=20, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(UserError, match="document_mask=true: .*BloomForCausalLM cannot keep documents apart"):
        pretrained.check_documents(bloom, folder, 12)
    mistral = transformers.MistralForCausalLM(transformers.MistralConfig(**DOCUMENTS["Mistral"]))
    with pytest.raises(UserError, match="MistralForCausalLM cannot keep documents apart"):
        pretrained.check_documents(mistral, folder, 13)
