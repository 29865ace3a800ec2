"""Tiny causal models with chat templates, and conversations to tune them on: made on the spot, nothing is fetched."""

import json
import random
from pathlib import Path

import torch
from huggingface import WORDS

# ChatML, with the marks that say what the assistant writes, and without them.
_HEAD = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
_PLAIN = "{{ m['content'] }}<|im_end|>\n"
_PROMPT = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_MARKED = (
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>\n{% endgeneration %}{% else %}"
    + _PLAIN
    + "{% endif %}"
)
MARKED, UNMARKED = _HEAD + _MARKED + _PROMPT, _HEAD + _PLAIN + _PROMPT
# As Qwen3's: an earlier message of the assistant is written otherwise than the last one.
CHANGING = (
    _HEAD
    + "{% if m['role'] == 'assistant' and loop.last %}<think>\n</think>\n{% endif %}{{ m['content'] }}<|im_end|>\n"
    + _PROMPT
)


def write_chat_model(folder: Path, template: str | None = UNMARKED, kind: str = "gpt", end: str = "<|im_end|>") -> Path:
    """A folder with random weights and a byte-level tokenizer; `kind`: "gpt" or "llama"; `end`: its `eos_token`."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = list(dict.fromkeys(["<|pad|>", "<|im_start|>", "<|im_end|>", end]))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    model.train_from_iterator([" ".join(WORDS), "system user assistant tool"] * 3, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<|pad|>", eos_token=end, chat_template=template
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(4)
    common = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": special.index(end),
        "initializer_range": 0.2,
    }
    if kind == "gpt":
        config = transformers.GPT2Config(
            **common, n_embd=16, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    else:
        config = transformers.LlamaConfig(
            **common, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=24, max_position_embeddings=64, pad_token_id=None,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def conversations(number: int, seed: int = 3) -> list[list[dict[str, str]]]:
    """Some with a system message, of one turn or two."""
    rng = random.Random(seed)

    def message(role: str) -> dict[str, str]:
        return {"role": role, "content": " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))}

    found = []
    for _ in range(number):
        chat = [message("system")] if rng.random() < 0.3 else []
        for _ in range(rng.choice([1, 1, 2])):
            chat += [message("user"), message("assistant")]
        found.append(chat)
    return found


def write_conversations(path: Path, chats: list[list[dict[str, str]]], column: str = "messages") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": n, column: chat}) + "\n" for n, chat in enumerate(chats)))
    return path
