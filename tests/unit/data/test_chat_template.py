"""Which tokens of a conversation the assistant wrote: as transformers says, with the template's marks and without."""

import json
import pickle
from datetime import datetime, tzinfo
from pathlib import Path

import numpy as np
import pytest
import transformers
from chats import CHANGING, MARKED, UNMARKED, conversations, write_chat_model
from tokenizers import processors

from hvd_transformer.data.chat_template import ChatTemplate, ConversationEncoder
from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer
from hvd_transformer.data.splits import RawExample
from hvd_transformer.errors import UserError

CHATS = [
    *conversations(40),
    [{"role": "user", "content": "  naïve — 好 😀 "}, {"role": "assistant", "content": "\n\nfine 😀\n"}],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, {"role": "user", "content": "and"}],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("chat"), MARKED)


def template_of(folder: Path, text: str | None, trims: bool = False) -> ChatTemplate:
    files = PretrainedTokenizer.read(folder).files()
    files.pop("chat_template.jinja")
    tokenizer = PretrainedTokenizer(files if text is None else {**files, "chat_template.jinja": text})
    if trims:
        tokenizer.model.post_processor = processors.ByteLevel(trim_offsets=True)
    return ChatTemplate(tokenizer, "here")


def wanted(folder: Path, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    found = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return found["input_ids"], found["assistant_masks"]


@pytest.mark.parametrize(("text", "trims"), [(MARKED, False), (UNMARKED, False), (UNMARKED, True)])
def test_the_mask_is_that_of_transformers(folder: Path, text: str, trims: bool) -> None:
    template = template_of(folder, text, trims)
    for messages in CHATS:
        ids, mask = wanted(folder, messages)
        tokens, places = template.encode(messages)
        assert tokens.tolist() == ids
        assert places.tolist() == np.flatnonzero(mask).tolist()
        assert 0 < len(places) < len(ids)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (MARKED, "<|im_end|>"),
        (UNMARKED, "<|im_end|>"),
        ("{% for m in messages %}{{ m['content'] }} {% endfor %}", None),  # no special token
        ("{% for m in messages %}<|im_start|>{{ m['content'] | upper }}{% endfor %}", None),  # not as it was
        ("{% for m in messages %}{{ raise_exception('never') }}{% endfor %}", None),
    ],
)
def test_the_token_that_ends_a_turn(folder: Path, text: str, end: str | None) -> None:
    template = template_of(folder, text)
    assert template.turn_end == (None if end is None else template.tokenizer.model.token_to_id(end))


def test_a_prompt_ends_where_the_assistant_begins(folder: Path) -> None:
    template = template_of(folder, UNMARKED)
    tokens, places = template.encode(CHATS[0])
    last = len(CHATS[0]) - 1
    assert CHATS[0][last]["role"] == "assistant"
    prompt = template.prompt(CHATS[0][:last]).tolist()
    assert tokens[: len(prompt)].tolist() == prompt
    assert len(prompt) in places and len(prompt) - 1 not in places


@pytest.mark.parametrize(
    ("text", "messages", "message"),
    [
        (CHANGING, [*CHATS[-2], *CHATS[-2]], "message 2: which tokens are the assistant's is ambiguous"),
        (UNMARKED, CHATS[-2][1:], "message 1 is the assistant's: this needs a chat template with {% generation %}"),
        ("{{ raise_exception('roles must alternate') }}", CHATS[0], "the chat template fails: roles must alternate"),
        ("{% for m in %}", CHATS[0], "the chat template fails: "),
    ],
)
def test_what_a_template_cannot_tell_is_refused_with_its_line(
    folder: Path, text: str, messages: list[dict[str, str]], message: str
) -> None:
    encoder = ConversationEncoder(template_of(folder, text))
    with pytest.raises(UserError) as caught:
        encoder.encode([RawExample((json.dumps(messages),), None, "chats.jsonl, line 7")])
    assert str(caught.value).startswith(f"chats.jsonl, line 7: {message}")
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_template_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="here: its tokenizer has no chat template"):
        template_of(folder, None)


def test_an_encoder_goes_to_worker_processes_and_cuts(folder: Path) -> None:
    encoder = pickle.loads(pickle.dumps(ConversationEncoder(template_of(folder, UNMARKED))))
    (arrays,) = encoder.encode([RawExample((json.dumps(CHATS[0]),), None, "here")])
    tokens, places = wanted(folder, CHATS[0])
    limit = len(tokens) - 3
    short, kept = encoder.shorten(arrays, [limit, limit])
    assert short.tolist() == tokens[:limit]
    assert kept.tolist() == np.flatnonzero(places[:limit]).tolist()


def test_todays_date_is_none_of_the_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the same conversations would have other tokens tomorrow. A prompt gets today's."""
    from transformers.utils import chat_template_utils

    class Later(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Later":
            return cls(2031, 5, 4)

    template = template_of(folder, "{{ strftime_now('%d %b %Y') }} " + MARKED)
    plain = template_of(folder, "{{ strftime_now('%d %b %Y') }} " + UNMARKED)
    before = [own.encode(CHATS[0])[0].tolist() for own in (template, plain)]
    monkeypatch.setattr(chat_template_utils, "datetime", Later)
    assert [own.encode(CHATS[0])[0].tolist() for own in (template, plain)] == before
    assert template.tokenizer.decode(before[0]).startswith("26 Jul 2024")
    assert template.tokenizer.decode(template.prompt(CHATS[0][:1])).startswith("04 May 2031")
