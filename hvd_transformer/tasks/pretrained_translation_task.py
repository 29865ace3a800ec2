"""Fine-tuning a Marian, M2M100 or NLLB of a Hugging Face folder: the translation task with its model and tokenizer."""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvd_transformer.config.schema import Config
from hvd_transformer.data.pair_tokenizer import PairTokenizer
from hvd_transformer.data.prepare_examples import TrainedVocabulary, prepare_examples
from hvd_transformer.data.prepared import PreparedExamples
from hvd_transformer.data.tokenizers import Tokenizer
from hvd_transformer.errors import UserError
from hvd_transformer.huggingface import origin
from hvd_transformer.inference.predict import padded
from hvd_transformer.models import pretrained
from hvd_transformer.models.classifier import class_loss
from hvd_transformer.nn.contracts import MicroBatch
from hvd_transformer.nn.dropout import torch_dropout_key
from hvd_transformer.tasks.pretrained_folder import folder_of
from hvd_transformer.tasks.pretrained_tasks import PretrainedTask
from hvd_transformer.tasks.task import Batch, PrepareContext
from hvd_transformer.tasks.translation_task import ROLES, TranslationTask, open_pairs


class PretrainedTranslationTask(PretrainedTask, TranslationTask):
    """Predicts each next token of a target from the tokens before it and the source."""

    model: Any  # also a TranslationTask's, which has an `EncoderDecoder`

    @classmethod
    def prepare(cls, config: Config, context: PrepareContext) -> PreparedExamples:
        pretrained.check_translates(folder_of(config))
        languages = config.data.source_language, config.data.target_language
        tokenizers: dict[str, Tokenizer] = {}
        for role in ROLES:
            tokenizers[role] = tokenizer = PairTokenizer.read(folder_of(config), role, languages)
            length = config.data.length_of(role)
            if tokenizer.longest is not None and length > tokenizer.longest:
                key = "target_length" if role == "target" and config.data.target_length else "sequence_length"
                raise UserError(
                    f"data.{key}={length}: longer than {origin(folder_of(config))} can take, {tokenizer.longest} tokens"
                )
        learned = TrainedVocabulary(tokenizers, [])
        return prepare_examples(config.data, open_pairs(config, context), ROLES, learned=learned, context=context)

    def make_model(self) -> Any:
        folder = folder_of(self.config)
        model = pretrained.load_translator(folder)
        vocab_size = max(tokenizer.vocab_size for tokenizer in self.data.tokenizers.values())
        longest = max(map(self.config.data.length_of, ROLES))
        pretrained.check_fits(model, folder, vocab_size, longest)
        return model

    @property
    def num_positions(self) -> int:
        return pretrained.num_positions(self.model) or sys.maxsize

    @property
    def num_training_targets(self) -> int:
        return len(self.data.splits["train"].texts["target"].tokens)

    @property
    def longest_inputs(self) -> Mapping[str, int]:
        source, target = map(self.config.data.length_of, ROLES)
        return {"input_ids": source, "decoder_input_ids": target}

    def input_lengths(self, batch: Batch) -> list[int]:
        return [texts.size(1) for texts in batch]

    @property
    def _pad(self) -> int:
        return self.data.tokenizers["target"].pad

    def collate(self, split: str, numbers: NDArray[np.int64]) -> Batch:
        """Sources [B, S] and targets [B, T], with the special tokens of the folder's tokenizer."""
        sources, targets = (self.data.splits[split].texts[role] for role in ROLES)
        return tuple(padded([texts[number] for number in numbers], self._pad) for texts in (sources, targets))

    def micro_batch(self, batch: Batch) -> MicroBatch:
        """The decoder gets the model's start token, then the target without its last token."""
        source, target = batch
        begins = torch.full_like(target[:, :1], self.model.config.decoder_start_token_id)
        shifted = torch.cat([begins, target[:, :-1]], 1)
        places = (target.flatten() != self._pad).nonzero().flatten()
        return MicroBatch((source, source != self._pad, shifted), (places, target.flatten()[places]))

    def num_targets(self, batch: Batch) -> int:
        return int((batch[1] != self._pad).sum())

    def loss(self, *tensors: Tensor) -> Tensor:
        source, allowed, shifted, places, goals = tensors
        with torch_dropout_key(source.device):
            logits = self.model(
                input_ids=source, attention_mask=allowed.long(), decoder_input_ids=shifted, use_cache=False
            ).logits  # [B, T, V]
        smoothing = self.config.training.label_smoothing if self.model.training else 0.0
        return class_loss(logits.flatten(0, 1).index_select(0, places), goals, smoothing)
