"""Typed configuration: schema, presets and loading. No torch."""

from hvd_transformer.config.load import check_words, dump, load, load_again
from hvd_transformer.config.schema import Config

__all__ = ["Config", "check_words", "dump", "load", "load_again"]
