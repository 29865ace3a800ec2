"""Train Transformers on many hosts with Horovod."""

__version__ = "0.1.0"
