"""What is trained. The names below are all that a user-defined task needs (docs/own-task.md)."""

from hvd_transformer.models.layers import Block, TokenEmbedding
from hvd_transformer.nn.contracts import Layer, MicroBatch, TensorSplit
from hvd_transformer.nn.dropout import Dropout, number_dropouts
from hvd_transformer.tasks.task import Batch, Data, EvaluationSpec, ExampleTask, ModelSketch, PrepareContext, Task

__all__ = [
    "Batch",
    "Block",
    "Data",
    "Dropout",
    "EvaluationSpec",
    "ExampleTask",
    "Layer",
    "MicroBatch",
    "ModelSketch",
    "PrepareContext",
    "Task",
    "TensorSplit",
    "TokenEmbedding",
    "number_dropouts",
]
