"""Instruction tuning: conversations of `data.messages_column`, with the loss on the assistant's tokens."""

import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hvd_transformer.config.schema import Config
from hvd_transformer.data.chat_template import ChatTemplate, ConversationEncoder, end_tokens
from hvd_transformer.data.conversations import ConversationFiles
from hvd_transformer.data.prepare_examples import TrainedVocabulary, prepare_examples
from hvd_transformer.data.prepared import PreparedExamples
from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer
from hvd_transformer.data.published import source_path
from hvd_transformer.data.splits import ExampleSource
from hvd_transformer.data.tokenizers import Tokenizer
from hvd_transformer.errors import UserError
from hvd_transformer.huggingface import origin
from hvd_transformer.inference.generation import Sampling, generate
from hvd_transformer.inference.predict import padded
from hvd_transformer.nn.contracts import MicroBatch
from hvd_transformer.tasks.pretrained_folder import folder_of, folder_tokenizer
from hvd_transformer.tasks.task import Batch, EvaluationSpec, ExampleTask, PrepareContext

# Each sample's token numbers, and the places of those that the assistant wrote.
ROLES = TOKENS, PLACES = "tokens", "places"
_NEW_TOKENS = 128  # of a text sample, at most


class ChatTask(ExampleTask):
    """Predicts each next token of the assistant's messages from the conversation before it."""

    data: PreparedExamples

    @classmethod
    def prepare(cls, config: Config, context: PrepareContext) -> PreparedExamples:
        if config.model.pretrained is None:
            column = config.data.messages_column
            raise UserError(f"data.messages_column={column}: needs model.pretrained, a folder with a chat template")
        template = ChatTemplate(folder_tokenizer(config), origin(folder_of(config)))
        return _prepared(config, _open(config, context), template, context)

    @classmethod
    def prepare_evaluation(cls, config: Config, context: PrepareContext, wanted: EvaluationSpec) -> PreparedExamples:
        data, tokenizer = config.data, wanted.tokenizers[""]
        assert isinstance(tokenizer, PretrainedTokenizer)
        if wanted.path is not None:
            source = ConversationFiles(data, context.should_stop).open_split(wanted.path, wanted.split)
        else:
            source = _open(config, context).only(wanted.split, f"data.source={data.source}")
        return _prepared(config, source, ChatTemplate(tokenizer, "the checkpoint"), context)

    def describe(self) -> str:
        conversations = self.data.splits["train"]
        share = self.num_training_targets / len(conversations.texts[TOKENS].tokens)
        return (
            f"{len(conversations):,} training conversations, {share:.0%} of their tokens the assistant's, vocabulary "
            f"{self.tokenizers[''].vocab_size:,}"
        )

    @property
    def tokenizers(self) -> Mapping[str, Tokenizer]:
        return {"": self.data.tokenizers[TOKENS]}

    @property
    def num_training_targets(self) -> int:
        return len(self.data.splits["train"].texts[PLACES].tokens)

    def collate(self, split: str, numbers: NDArray[np.int64]) -> Batch:
        """Token numbers [B, T], and which of them the assistant wrote [B, T], bool."""
        tokens, places = (self.data.splits[split].texts[role] for role in ROLES)
        block = padded([tokens[number] for number in numbers], self.tokenizers[""].pad)
        mask = torch.zeros(block.shape, dtype=torch.bool)
        for row, number in enumerate(numbers):
            mask[row, torch.from_numpy(places[number].astype(np.int64))] = True
        return block, mask

    def micro_batch(self, batch: Batch) -> MicroBatch:
        """Padding is behind the tokens, where a causal model does not see it."""
        tokens, mask = batch
        chosen = mask[:, 1:].flatten().nonzero().flatten()
        goals = tokens[:, 1:].flatten()[chosen]
        return MicroBatch((tokens[:, :-1].contiguous(),), (goals, chosen))

    def num_targets(self, batch: Batch) -> int:
        return int(batch[1][:, 1:].sum())

    def text_samples(self, split: str, number: int) -> Sequence[Mapping[str, str]]:
        """Other last answers of the assistant in the first conversations of the split."""
        tokenizer, limit = self.tokenizers[""], self.config.data.sequence_length
        assert isinstance(tokenizer, PretrainedTokenizer)
        template = ChatTemplate(tokenizer, "the checkpoint")
        chosen: list[tuple[NDArray[np.uint32], str]] = []
        for (text,) in self.data.raw_texts(split):
            if len(chosen) == number:
                break
            messages = json.loads(text)
            last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
            try:
                prompt = template.prompt(messages[:last]) if last else np.empty(0, np.uint32)
            except ValueError:  # the template takes the whole conversation, but not this part of it
                continue
            if 0 < len(prompt) < limit:
                chosen.append((prompt, messages[last]["content"]))
        if not chosen:
            return ()
        prompts = [prompt.tolist() for prompt, _ in chosen]
        sampling = Sampling(seed=self.config.seed)
        ends, vocab_size = end_tokens(tokenizer), tokenizer.vocab_size
        found = generate(self.model, prompts, _NEW_TOKENS, sampling, limit, lambda *_: self.tick(), ends, vocab_size)
        return [
            {"prompt": tokenizer.decode(prompt), "reference": reference, "answer": tokenizer.decode(answer)}
            for (prompt, reference), answer in zip(chosen, found, strict=True)
        ]


def _open(config: Config, context: PrepareContext) -> ExampleSource:
    return ConversationFiles(config.data, context.should_stop).open(source_path(config.data, {}, context), config.seed)


def _prepared(
    config: Config, source: ExampleSource, template: ChatTemplate, context: PrepareContext
) -> PreparedExamples:
    learned = TrainedVocabulary(dict.fromkeys(ROLES, template.tokenizer), [])
    encoder = ConversationEncoder(template)
    return prepare_examples(config.data, source, ROLES, shared=True, learned=learned, encoder=encoder, context=context)
