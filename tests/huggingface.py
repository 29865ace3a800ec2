"""Tiny Hugging Face folders, made on the spot: their weights are random, nothing is fetched."""

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
