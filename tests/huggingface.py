"""Tiny Hugging Face folders, made on the spot: their weights are random, nothing is fetched."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

WORDS = ["a", "the", "room", "was", "very", "not", "good", "bad", "and", "clean"]


def write_tokenizer(folder: Path) -> None:
    """BERT's, for the words above."""
    from transformers import BertTokenizerFast

    folder.mkdir(parents=True)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]), encoding="utf-8")
    BertTokenizerFast(vocab=str(vocabulary)).save_pretrained(folder)


def write_bert(folder: Path, dropout: float = 0.0) -> Path:
    """An encoder without a head, of 16 positions."""
    from transformers import BertConfig, BertModel

    write_tokenizer(folder)
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=5 + len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        initializer_range=0.2,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


def write_gpt(folder: Path) -> Path:
    """A causal language model of 24 positions, its output layer tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    write_tokenizer(folder)
    torch.manual_seed(4)
    config = GPT2Config(
        vocab_size=5 + len(WORDS), n_embd=16, n_layer=2, n_head=2, n_positions=24, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


# Grouped heads; a Llama of biases and its output layer tied.
SMALL = {
    "vocab_size": 5 + len(WORDS) + 3, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 64, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
OWN_FAMILIES = {
    "llama": ("Llama", {"rope_parameters": ROPE}),
    "llama-biased": (
        "Llama",
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3", {"head_dim": 8, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
}


def write_own_family(folder: Path, name: str) -> Path:
    """A causal language model of a family that trains in our blocks, with norms and biases that are not the usual ones;
    its embedding has three rows that are no token's."""
    import transformers

    write_tokenizer(folder)
    kind, more = OWN_FAMILIES[name]
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SMALL | more))
    for weight in model.parameters():
        if weight.dim() == 1:
            torch.nn.init.normal_(weight, 1.0, 0.2)
    model.save_pretrained(folder)
    return folder


def write_marian(folder: Path, lines: Sequence[str]) -> Path:
    """A translator of 32 positions, its SentencePiece models learned from the lines; its output layer has a bias."""
    import sentencepiece
    from transformers import MarianConfig, MarianMTModel, MarianTokenizer

    folder.mkdir(parents=True)
    pieces = {}
    for side in ("source", "target"):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_prefix=str(folder / side), vocab_size=40, hard_vocab_limit=False,
            minloglevel=2,
        )  # fmt: skip
        (folder / f"{side}.model").rename(folder / f"{side}.spm")
        (folder / f"{side}.vocab").unlink()
        own = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        pieces |= {own.id_to_piece(number): None for number in range(own.get_piece_size())}
    tokens = ["</s>", "<unk>", *(piece for piece in pieces if piece not in ("<s>", "</s>", "<unk>")), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    tokenizer = MarianTokenizer(
        source_spm=str(folder / "source.spm"), target_spm=str(folder / "target.spm"), vocab=str(folder / "vocab.json")
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(6)
    end, pad = tokens.index("</s>"), tokens.index("<pad>")
    model = MarianMTModel(MarianConfig(**_TRANSLATOR, vocab_size=len(tokens), eos_token_id=end, pad_token_id=pad,
        decoder_start_token_id=pad, forced_eos_token_id=end, decoder_vocab_size=len(tokens), scale_embedding=True,
    ))  # fmt: skip
    torch.nn.init.normal_(model.final_logits_bias, std=0.3)
    model.save_pretrained(folder)
    return folder


def write_nllb(folder: Path, lines: Sequence[str]) -> Path:
    """A translator of many languages, as NLLB is one: M2M100's class and a tokenizer of byte pairs."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import M2M100Config, M2M100ForConditionalGeneration, NllbTokenizer

    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    learned.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=60, special_tokens=specials, show_progress=False))
    found = json.loads(learned.to_str())["model"]
    merges = [tuple(pair) for pair in found["merges"]]
    tokenizer = NllbTokenizer(vocab=found["vocab"], merges=merges, src_lang="deu_Latn", tgt_lang="eng_Latn")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    size = len(tokenizer) + 2
    model = M2M100ForConditionalGeneration(M2M100Config(**_TRANSLATOR, vocab_size=size, decoder_start_token_id=2))
    model.save_pretrained(folder)
    return folder


_TRANSLATOR = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32, "dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "init_std": 0.2,
}  # fmt: skip
