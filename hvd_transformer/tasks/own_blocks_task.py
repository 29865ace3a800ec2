"""Fine-tuning a Llama or a Qwen3 of a Hugging Face folder in this package's own blocks (`config.families`)."""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hvd_transformer.checkpoint.store import MODEL
from hvd_transformer.checkpoint.stored_tensors import StoredTensors
from hvd_transformer.config.schema import Config
from hvd_transformer.data.prepare_mixture import prepare_sources
from hvd_transformer.data.prepared import PreparedData
from hvd_transformer.errors import UserError
from hvd_transformer.huggingface import origin
from hvd_transformer.models.flops import language_model_flops
from hvd_transformer.models.language_model import LanguageModel
from hvd_transformer.models.llama_weights import piece_shapes, their_names
from hvd_transformer.models.pretrained import GENERATION
from hvd_transformer.tasks.chat_task import ChatTask
from hvd_transformer.tasks.decoder_task import DecoderTask
from hvd_transformer.tasks.language_model_task import LanguageModelTask
from hvd_transformer.tasks.pretrained_folder import folder_of, folder_tokenizer
from hvd_transformer.tasks.task import Batch, PrepareContext

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class OwnBlocks(DecoderTask):
    """Predicts each next token; the weights begin as the folder's."""

    def stored_weights(self) -> Callable[[str], Tensor]:
        config, folder = self.config.model, folder_of(self.config)
        # Old shards stay beside a model that was saved again in one file, which transformers prefers.
        stored = StoredTensors(folder, MODEL, indexed=not (folder / MODEL).is_file())
        names = their_names(config)
        theirs = {name for pieces in names.values() for name in pieces}
        # A tied output layer may be there again, and old versions wrote the angles of the rotation.
        more = [name for name in stored.names if name not in theirs | {_HEAD} and "rotary_emb" not in name]
        if lacking := sorted(theirs - set(stored.names)):
            raise UserError(f"{origin(folder)}: lacks {lacking[0]}, a weight of its model")
        if more:
            raise UserError(f"{origin(folder)}: has {more[0]}, which is not a weight of its model")
        _check_tied(stored, theirs, folder)
        with torch.device("meta"):
            shapes = {name: weight.shape for name, weight in LanguageModel(self.rows, config).named_parameters()}
        for name, pieces in names.items():
            for one, shape in zip(pieces, piece_shapes(config, shapes[name], pieces), strict=True):
                if stored.shape(one) != shape:
                    found = list(stored.shape(one))
                    raise UserError(f"{origin(folder)}: {one} is {found}, but its config.json makes it {list(shape)}")
        return lambda name: torch.cat([stored.whole(one) for one in names[name]])

    @property
    def files(self) -> Mapping[str, str]:
        """How the folder's model generates, for `export --format transformers`; transformers ignores a damaged file."""
        try:
            text = (folder_of(self.config) / GENERATION).read_text(encoding="utf-8")
            return {GENERATION: text} if isinstance(json.loads(text), dict) else {}
        except (OSError, ValueError):
            return {}


def _check_tied(stored: StoredTensors, names: Collection[str], folder: Path) -> None:
    """Raise `UserError` if the model ties its output layer, but the folder has another one, with which transformers
    computes."""
    if _HEAD in names or _HEAD not in stored.names:
        return
    head, embedding = stored.whole(_HEAD), stored.whole(_EMBEDDING)
    if head.shape != embedding.shape or not torch.equal(head, embedding):
        raise UserError(
            f"{origin(folder)}: {_HEAD} is not {_EMBEDDING}, although its config.json says tie_word_embeddings=true; "
            "set it to false there"
        )


class OwnBlocksTask(OwnBlocks, LanguageModelTask):
    """Fine-tunes a Hugging Face causal language model on text, in this package's own blocks."""

    @classmethod
    def prepare(cls, config: Config, context: PrepareContext) -> PreparedData:
        return prepare_sources(config.data, folder_tokenizer(config), context)


class OwnBlocksChatTask(OwnBlocks, ChatTask):
    """Fine-tunes a Hugging Face causal language model on conversations, in this package's own blocks."""

    def flops(self, batch: Batch) -> float:
        samples, length = batch[0].shape
        return language_model_flops(self.config.model, self.rows, (samples, length - 1), self.num_targets(batch))
