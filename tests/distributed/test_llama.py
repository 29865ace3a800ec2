"""A Llama and a Qwen3 train in our blocks as transformers' own modules do in a plain loop, however they are cut."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from huggingface import WORDS, write_llama, write_qwen
from jobs import summary, weights
from test_fine_tuning import LENGTH, SEED, difference, of_text, write_texts
from torch import Tensor

from hvd_transformer.cli.main import main  # noqa: F401
from hvd_transformer.config import load
from hvd_transformer.models.llama_weights import their_names

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.distributed
