"""Typed configuration: the schema, the presets, and how a job's settings are put together."""

from hvd_transformer.config.load import check_words, dump, load, load_again, load_file
from hvd_transformer.config.schema import Config

__all__ = ["Config", "check_words", "dump", "load", "load_again", "load_file"]
