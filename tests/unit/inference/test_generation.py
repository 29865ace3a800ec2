"""Generation with the cache, many prompts at once, against the whole model over the whole text for every token."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.inference import generation
from hvd_transformer.inference.generation import Sampling, _generator, generate
from hvd_transformer.models.language_model import LanguageModel

V, MAX_LENGTH = 40, 24
WAYS = {
    "greedy": Sampling(temperature=0),
    "drawn": Sampling(temperature=1.3),
    "top-k": Sampling(temperature=0.8, top_k=5, seed=7),
    "top-p": Sampling(top_p=0.8, seed=8),
    "both": Sampling(temperature=1.5, top_k=12, top_p=0.9, seed=9),
}


def random_model(**changes: object) -> LanguageModel:
    """In float64: no two logits come so close that rounding could decide."""
    sizes = {"num_layers": 3, "d_model": 16, "num_heads": 2, "d_feedforward": 24, "max_length": MAX_LENGTH}
    torch.manual_seed(1)
    model = LanguageModel(V, ModelConfig(**{"tie_embeddings": False, **sizes, **changes})).double().eval()
    with torch.no_grad():
        for weight in model.parameters():  # far from what a fresh model has, so that greedy search goes on changing
            weight.add_(torch.randn(weight.shape, dtype=weight.dtype), alpha=0.4)
    return model


def ragged_prompts() -> list[list[int]]:
    """Two of the same length among them, and one that leaves a single position."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(V, (length,), generator=generator).tolist() for length in (5, 2, 9, 5, MAX_LENGTH - 1, 1)]


@torch.no_grad()
def plain_loop(model: LanguageModel, prompts: Sequence[list[int]], most: int, sampling: Sampling) -> list[list[int]]:
    """A prompt at a time, all its tokens again for each."""
    found = []
    for number, prompt in enumerate(prompts):
        generator, text = _generator(sampling.seed, number), list(prompt)
        while len(text) < min(len(prompt) + most, MAX_LENGTH):
            text.append(plain_draw(model(torch.tensor([text]))[0, -1], sampling, generator))
        found.append(text[len(prompt) :])
    return found


def plain_draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """By counting down from the likeliest token."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities = (logits / sampling.temperature).softmax(-1)
    kept = probabilities.argsort(descending=True)[: sampling.top_k].tolist()
    if sampling.top_p is not None:
        enough, together = sampling.top_p * float(probabilities[kept].sum()), 0.0
        for count, token in enumerate(kept, start=1):
            together += float(probabilities[token])
            if together >= enough:
                kept = kept[:count]
                break
    weights = torch.zeros_like(probabilities)
    weights[kept] = probabilities[kept]
    return int(torch.multinomial(weights / weights.sum(), 1, generator=generator))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rotary"])
def test_the_cache_gives_the_tokens_of_computing_all_again(position: str, norm: str, way: str) -> None:
    model, prompts = random_model(position=position, norm=norm), ragged_prompts()
    found = generate(model, prompts, 12, WAYS[way], MAX_LENGTH)
    assert found == plain_loop(model, prompts, 12, WAYS[way])
    assert [len(tokens) for tokens in found] == [12, 12, 12, 12, 1, 12]
    assert len({token for tokens in found for token in tokens}) > 2  # not the same word for ever


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-5])
def test_the_lowest_temperatures_draw_the_likeliest(temperature: float) -> None:
    model, prompts = random_model(), ragged_prompts()
    found = generate(model, prompts, 12, Sampling(temperature=temperature), MAX_LENGTH)
    assert found == generate(model, prompts, 12, Sampling(temperature=0), MAX_LENGTH)


@pytest.mark.parametrize("changes", [{"num_layers": 1}, {"tie_embeddings": True}, {"num_heads": 8}])
def test_so_it_does_with_other_models(changes: dict[str, object]) -> None:
    model, prompts = random_model(**changes), ragged_prompts()
    for way in ("greedy", "both"):
        assert generate(model, prompts, 30, WAYS[way], MAX_LENGTH) == plain_loop(model, prompts, 30, WAYS[way])


def test_a_text_ends_with_its_end_token_which_is_not_part_of_it() -> None:
    """Each prompt's continuation up to the first such token; prompts that go on are not disturbed."""
    model, prompts, sampling = random_model(), ragged_prompts(), Sampling(temperature=1.3)
    whole = plain_loop(model, prompts, 12, sampling)
    end = next(token for token in whole[0][2:] if any(token not in row and len(row) == 12 for row in whole))
    wanted = [row[: row.index(end)] if end in row else row for row in whole]
    assert len(wanted[0]) < 12
    heard: list[list[int]] = [[] for _ in prompts]
    found = generate(model, prompts, 12, sampling, MAX_LENGTH, lambda number, token: heard[number].append(token), [end])
    assert found == heard == wanted


@pytest.mark.parametrize("batch_size", [1, 2, 4, 99])
def test_batches_of_prompts_of_similar_length_give_the_same_in_order(
    batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "_WINDOW", 5)
    model, prompts = random_model(), [*ragged_prompts(), *ragged_prompts()[::-1]]
    sizes: list[list[int]] = []
    real = generation.generate

    def watched(model: LanguageModel, rows: Sequence[Sequence[int]], *more: Any, **named: Any) -> list[list[int]]:
        sizes.append([len(row) for row in rows])
        return real(model, rows, *more, **named)

    monkeypatch.setattr(generation, "generate", watched)
    sampling = WAYS["both"]
    found = list(generation.generate_in_batches(model, prompts, 12, sampling, MAX_LENGTH, batch_size))
    assert found == plain_loop(model, prompts, 12, sampling)
    assert max(map(len, sizes)) == min(batch_size, len(prompts))
    assert all(own == sorted(own) for own in sizes)


@pytest.mark.parametrize("kind", ["mamba", "lfm2", "falcon_h1", "gpt2"])
def test_models_of_transformers_whose_cache_cannot_select_rows(kind: str) -> None:
    """Against all tokens again for each: recurrent models have no keys, hybrid ones some layers without."""
    torch.manual_seed(1)
    common = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "eos_token_id": None, "pad_token_id": 0}
    config = {
        "mamba": lambda: transformers.MambaConfig(**common, state_size=4, initializer_range=0.5),
        "lfm2": lambda: transformers.Lfm2Config(
            **common, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1,
            layer_types=["conv", "full_attention"], initializer_range=0.5,
        ),
        "falcon_h1": lambda: transformers.FalconH1Config(  # keys and states of its own in each layer
            **common, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, mamba_d_ssm=16,
            mamba_n_heads=2, mamba_d_head=8, mamba_d_state=4, mamba_n_groups=1, initializer_range=0.5,
        ),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=V, n_embd=16, n_layer=2, n_head=2, eos_token_id=None),
    }[kind]()  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    prompts = ragged_prompts()
    found = generate(model, prompts, 6, Sampling(temperature=0), MAX_LENGTH)
    for prompt, more in zip(prompts, found, strict=True):
        text = list(prompt)
        while len(text) < min(len(prompt) + 6, MAX_LENGTH):
            with torch.no_grad():
                text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        assert more == text[len(prompt) :]


@pytest.mark.parametrize("adapted", [False, True])
def test_a_long_prompt_does_not_make_the_logits_of_all_its_tokens(adapted: bool) -> None:
    config = transformers.GPT2Config(vocab_size=V, n_embd=16, n_layer=2, n_head=2, eos_token_id=None)
    model = transformers.GPT2LMHeadModel(config).eval()
    lengths: list[int] = []
    model.lm_head.register_forward_hook(lambda module, given, made: lengths.append(made.size(1)))
    if adapted:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["c_attn"]))
    generate(model, [[1] * 9, [2] * 9], 3, Sampling(temperature=0), MAX_LENGTH)
    assert lengths == [1, 1, 1]


@pytest.mark.parametrize("way", WAYS)
def test_rows_without_a_token_are_never_sampled(way: str) -> None:
    """As if the model did not have them."""
    model, prompts = random_model(tie_embeddings=False), [[3, 1], [0, 2, 5]]
    found = generate(model, prompts, 12, WAYS[way], MAX_LENGTH, vocab_size=7)
    assert max(generate(model, prompts, 12, WAYS[way], MAX_LENGTH)[0]) >= 7
    with torch.no_grad():
        model.head.weight, model.head.bias = (
            torch.nn.Parameter(weight[:7]) for weight in (model.head.weight, model.head.bias)
        )
    assert found == plain_loop(model, prompts, 12, WAYS[way])
