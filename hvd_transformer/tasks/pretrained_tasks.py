"""Fine-tuning the model of a Hugging Face folder (`model.pretrained`): the same tasks with its model and tokenizer."""

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from hvd_transformer.config.schema import Config
from hvd_transformer.data.prepare_examples import TrainedVocabulary, prepare_examples
from hvd_transformer.data.prepare_mixture import prepare_sources
from hvd_transformer.data.prepared import PreparedData, PreparedExamples
from hvd_transformer.data.sampler import Replica
from hvd_transformer.errors import UserError
from hvd_transformer.huggingface import origin
from hvd_transformer.models import lora, pretrained
from hvd_transformer.models.classifier import class_loss, classification_loss
from hvd_transformer.models.counted_flops import CountedFlops, counted_flops
from hvd_transformer.nn.contracts import Layer
from hvd_transformer.nn.dropout import torch_dropout_key
from hvd_transformer.tasks.chat_task import ChatTask
from hvd_transformer.tasks.classification_task import ROLE, ClassificationTask, open_examples
from hvd_transformer.tasks.language_model_task import LanguageModelTask
from hvd_transformer.tasks.pretrained_folder import folder_of, folder_tokenizer
from hvd_transformer.tasks.task import Batch, ModelSketch, PrepareContext, Task

_NAME = "model"  # the name of the only layer


class PretrainedTask(Task):
    """Common to both kinds of fine-tuning: the model is a single layer, whose parameters keep their names."""

    def __init__(self, config: Config, data: Any, replica: Replica) -> None:
        super().__init__(config, data, replica)
        self.model = self.make_model()  # at once: its weights come from the folder
        self._flops: CountedFlops | None = None
        if config.parallel.recompute == "always":
            pretrained.recompute(self.model, folder_of(config))

    @classmethod
    def layer_names(cls, config: Config) -> list[str]:
        return [_NAME]

    @classmethod
    def sketch(cls, config: Config, vocab_size: int, num_samples: int) -> ModelSketch:
        raise UserError(f"{origin(folder_of(config))}: plan and bench support only models of this package")

    @property
    def layers(self) -> list[Layer]:
        return [Layer(_NAME, self.model, self.loss, recompute=False)]

    @abstractmethod
    def loss(self, *tensors: Tensor) -> Tensor:
        """The sum of the losses of a micro-batch, as the last layer of any task."""

    @property
    def longest_inputs(self) -> Mapping[str, int]:
        """The inputs of the model by name, with their maximum lengths in tokens."""
        return {"input_ids": self.config.data.sequence_length}

    def input_lengths(self, batch: Batch) -> list[int]:
        """The lengths of these inputs in a training batch."""
        return [batch[0].size(1)]

    def count_flops(self) -> None:
        self._flops = counted_flops(self.model, self.longest_inputs)

    def flops(self, batch: Batch) -> float:
        return 0.0 if self._flops is None else self._flops.of_batch(len(batch[0]), self.input_lengths(batch))

    @property
    def files(self) -> Mapping[str, str]:
        return pretrained.config_files(self.model)


class PretrainedClassificationTask(PretrainedTask, ClassificationTask):
    """Predicts the label of a text by an encoder, or a causal language model, with its own head or a new one."""

    @classmethod
    def prepare(cls, config: Config, context: PrepareContext) -> PreparedExamples:
        folder = folder_of(config)
        pretrained.check_classifies(folder)  # before its data is prepared
        tokenizer = folder_tokenizer(config).with_pad()
        if tokenizer is None:
            raise UserError(f"{origin(folder)}: its tokenizer has no pad token, which fills a batch, and no eos_token")
        source, own = open_examples(config, context), pretrained.label_names(folder)

        def prepared(labels: list[str] | None) -> PreparedExamples:
            learned = TrainedVocabulary({ROLE: tokenizer}, labels)
            return prepare_examples(config.data, source, (ROLE,), learned=learned, context=context)

        found = prepared(None)
        # If the head has these labels already, its own numbers of them are kept.
        return prepared(own) if own is not None and sorted(own) == sorted(found.labels) else found

    def make_model(self) -> nn.Module:
        folder, tokenizer = folder_of(self.config), self.data.tokenizers[ROLE]
        model, self.new = pretrained.load_classifier(folder, self.labels, tokenizer.pad)
        pretrained.check_fits(model, folder, tokenizer.vocab_size, self.config.data.sequence_length)
        self.logits = pretrained.ClassLogits(model)
        self.smoothing = self.config.training.label_smoothing
        return model

    def describe(self) -> str:
        return super().describe() + (f"; new weights: {', '.join(self.new)}" if self.new else "; no new weights")

    def loss(self, *tensors: Tensor) -> Tensor:
        tokens, allowed, labels = tensors
        logits = self.logits(tokens, allowed)
        return classification_loss(logits, labels, self.smoothing, self.weights, training=self.model.training)


class _CausalTask(PretrainedTask):
    """Predicts each next token by a causal language model."""

    document_end: int | None = None

    def make_model(self) -> nn.Module:
        folder, data, model = folder_of(self.config), self.config.data, self.config.model
        found = pretrained.load_language_model(folder)
        if self.document_end is not None:
            pretrained.check_documents(found, folder, data.sequence_length)
        pretrained.check_fits(found, folder, self.tokenizers[""].vocab_size, data.sequence_length)
        return found if model.lora_rank is None else lora.add_adapters(found, folder, model)

    def loss(self, *tensors: Tensor) -> Tensor:
        """Sum of the cross-entropy of targets [B, T], or of targets [N] at `places` [N] of the B × T positions."""
        tokens, targets, *places = tensors
        smoothing = self.config.training.label_smoothing if self.model.training else 0.0
        with torch_dropout_key(tokens.device):
            logits = pretrained.text_logits(self.model, tokens, self.document_end).flatten(0, 1)  # [B × T, V]
        if places:
            logits = logits.index_select(0, places[0])
        return class_loss(logits, targets.flatten(), smoothing)

    @property
    def adapters(self) -> str:
        """The trained adapters, for `describe`."""
        return "" if self.config.model.lora_rank is None else f"; {lora.describe(self.model)}"

    @property
    def frozen(self) -> Collection[str]:
        if self.config.model.lora_rank is None:
            return ()
        return {name for name, weight in self.model.named_parameters() if not weight.requires_grad}

    @property
    def files(self) -> Mapping[str, str]:
        adapters = {} if self.config.model.lora_rank is None else lora.config_files(self.model)
        return {**super().files, **adapters}


class PretrainedLanguageModelTask(_CausalTask, LanguageModelTask):
    """Fine-tunes a Hugging Face causal language model on text, as transformers builds it."""

    def describe(self) -> str:
        return super().describe() + self.adapters

    @classmethod
    def prepare(cls, config: Config, context: PrepareContext) -> PreparedData:
        pretrained.check_continues_texts(folder_of(config))
        return prepare_sources(config.data, folder_tokenizer(config), context)


class PretrainedChatTask(_CausalTask, ChatTask):
    """Fine-tunes a Hugging Face causal language model on conversations, as transformers builds it."""

    @classmethod
    def prepare(cls, config: Config, context: PrepareContext) -> PreparedExamples:
        pretrained.check_continues_texts(folder_of(config))
        return super().prepare(config, context)

    def input_lengths(self, batch: Batch) -> list[int]:
        return [batch[0].size(1) - 1]  # the last token is a target only

    def describe(self) -> str:
        return super().describe() + self.adapters
