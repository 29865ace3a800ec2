"""The folder of `model.pretrained` and its tokenizer."""

from pathlib import Path

from hvd_transformer.config.schema import Config
from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer
from hvd_transformer.errors import UserError
from hvd_transformer.huggingface import origin


def folder_of(config: Config) -> Path:
    """The folder of `model.pretrained`."""
    return Path(str(config.model.pretrained)).expanduser()


def folder_tokenizer(config: Config) -> PretrainedTokenizer:
    """The tokenizer of the folder. Raises `UserError` if its limit is below the length of the samples."""
    folder, length = folder_of(config), config.data.sequence_length
    tokenizer = PretrainedTokenizer.read(folder)
    if tokenizer.longest is not None and length > tokenizer.longest:
        raise UserError(
            f"data.sequence_length={length}: longer than {origin(folder)} can take, {tokenizer.longest} tokens"
        )
    return tokenizer
