"""A tokenizer's chat template: makes token numbers of conversations, and says which ones the assistant wrote."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from hvd_transformer.data.example_encoder import Encoded
from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer
from hvd_transformer.data.splits import RawExample
from hvd_transformer.data.tokenizers import Ids, Tokenizer, sha256
from hvd_transformer.errors import UserError
from hvd_transformer.huggingface import from_folder

Messages = Sequence[Mapping[str, Any]]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ANSWER = "hvd-answer"  # which no template writes itself
_TODAY = re.compile(r"strftime_now\(\s*(['\"])([^'\"]*)\1\s*\)")  # in its usual form
_DATE = datetime(2024, 7, 26)  # of the data, in templates that ask for today's: what Llama 3.2's has without a clock


class ChatTemplate:
    """Renders conversations as the `apply_chat_template` of transformers does.

    Raises `UserError`, which begins with `given`, if the tokenizer has no template.
    """

    def __init__(self, tokenizer: PretrainedTokenizer, given: str) -> None:
        self.tokenizer, self.given = tokenizer, given
        if not isinstance(self._theirs.chat_template, str):
            raise UserError(f"{given}: its tokenizer has no chat template, such as chat_template.jinja")

    @property
    def _theirs(self) -> Any:
        """transformers' tokenizer. It is not kept: copies of this object would have to carry it."""
        return _as_transformers(self.tokenizer.json_text, self.given)

    @cached_property
    def text(self) -> str:
        return str(self._theirs.chat_template)

    @cached_property
    def _undated(self) -> str:
        """The template without a clock, else the same conversations would have other tokens tomorrow."""
        return _TODAY.sub(lambda found: json.dumps(_DATE.strftime(found[2])), self.text)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens that the template may name, such as eos_token."""
        return {name: str(token) for name, token in self._theirs.special_tokens_map.items()}

    def prompt(self, messages: Messages) -> Ids:
        """The token numbers [T] that the assistant's next message follows. Raises `ValueError`."""
        return self.tokenizer.encode(self._render(messages, add_generation_prompt=True, chat_template=self.text))

    @cached_property
    def turn_end(self) -> int | None:
        """The special token that the assistant's messages end with, such as <|im_end|>; None: they end without one."""
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
        try:
            _, found, after = self._render(messages).rpartition(_ANSWER)
        except ValueError:  # it takes other conversations only
            return None
        if not found:
            return None
        added = self.tokenizer.model.get_added_tokens_decoder()
        numbers = map(int, self.tokenizer.encode(after))
        return next((number for number in numbers if number in added and added[number].special), None)

    def encode(self, messages: Messages) -> tuple[Ids, Ids]:
        """The token numbers [T] of a conversation, and the places [N] of those that the assistant wrote.

        The template marks them with {% generation %}. Without these marks they are what each message of the assistant
        adds to the prompt before it. Raises `ValueError` if the template refuses the messages or that is ambiguous.
        """
        if _GENERATION.search(self.text) is None:
            return self._by_prefixes(messages)
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = self._call(messages, **options)
        return np.array(found["input_ids"], np.uint32), _places(np.array(found["assistant_masks"], bool))

    def _by_prefixes(self, messages: Messages) -> tuple[Ids, Ids]:
        whole = self._render(messages)
        encoding = self.tokenizer.model.encode(whole, add_special_tokens=False)
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        ends = np.maximum(ends, starts + 1)  # of some white space a tokenizer gives an empty span
        mask = np.zeros(len(starts), bool)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if number == 0:
                raise ValueError("message 1 is the assistant's: this needs a chat template with {% generation %}")
            before = self._render(messages[:number], add_generation_prompt=True)
            after = self._render(messages[: number + 1])
            if not (whole.startswith(after) and after.startswith(before)):
                raise ValueError(
                    f"message {number + 1}: which tokens are the assistant's is ambiguous, as the chat template writes "
                    "a message in another way when more follow; mark them in the template with {% generation %}"
                )
            mask |= (ends > len(before)) & (starts < len(after))
        return np.array(encoding.ids, np.uint32), _places(mask)

    def _render(self, messages: Messages, **options: Any) -> str:
        return str(self._call(messages, tokenize=False, **options))

    def _call(self, messages: Messages, **options: Any) -> Any:
        try:
            return self._theirs.apply_chat_template(messages, **{"chat_template": self._undated, **options})
        except Exception as error:  # what a template raises
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"the chat template fails: {said[0]}") from None


def end_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens that end a text: the tokenizer's own, and that of an assistant's message if it has a chat template."""
    found = [tokenizer.document_end]
    if isinstance(tokenizer, PretrainedTokenizer) and tokenizer.chat_template is not None:
        found.append(ChatTemplate(tokenizer, "the tokenizer").turn_end)
    return list(dict.fromkeys(number for number in found if number is not None))


class ConversationEncoder:
    """Encodes conversations in two roles: their token numbers, and the places of those that the assistant wrote.

    Implements `example_encoder.Encoder`.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.digest = sha256(json.dumps([template.text, template.special_tokens], sort_keys=True))

    def encode(self, examples: Sequence[RawExample]) -> list[Encoded]:
        return [self._encode(example) for example in examples]

    def shorten(self, arrays: Encoded, limits: Sequence[int]) -> Encoded:
        (tokens, places), limit = arrays, limits[0]
        return [tokens[:limit], places[places < limit]]

    def _encode(self, example: RawExample) -> Encoded:
        try:
            return list(self.template.encode(json.loads(example.texts[0])))
        except ValueError as error:
            raise UserError(f"{example.place}: {error}") from None


def _places(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> Ids:
    """Where the mask is true. Nothing precedes the first token, so that no model predicts it."""
    mask[:1] = False
    return mask.nonzero()[0].astype(np.uint32)


@lru_cache(1)
def _as_transformers(files: str, given: str) -> Any:
    """transformers' tokenizer of these files, `PretrainedTokenizer.json_text`."""
    with TemporaryDirectory() as folder:
        for name, text in json.loads(files).items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        return from_folder("PreTrainedTokenizerFast", Path(folder), given)
