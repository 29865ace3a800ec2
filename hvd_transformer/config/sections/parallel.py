"""The keys of the section `parallel`."""

from typing import Literal

from hvd_transformer.config.sections.key import Section, changeable


class ParallelConfig(Section):
    """Data, tensor and pipeline parallelism over ranks and devices."""

    pipeline: int = changeable(1, "pipeline parallelism: stages per rank, each on its own device", ge=1)
    tensor: int = changeable(
        1, "tensor parallelism: number of consecutive ranks that share each layer's matrices and form one replica", ge=1
    )
    vocab_parallel: bool = changeable(
        False, "also split the embedding and the output layer over the ranks of parallel.tensor"
    )
    tensor_across_hosts: Literal["warn", "never"] = changeable(
        "warn", "if a tensor-parallel group spans several hosts: warn, or refuse to start"
    )
    optimizer_shard: Literal["none", "state", "gradients"] = changeable(
        "none",
        "sharded optimizer: each replica stores and updates its shard; state: of the optimizer state (ZeRO-1); "
        "gradients: also of the gradients (ZeRO-2), which are then reduced after every micro-batch",
    )
    micro_batches: int = changeable(1, "number of micro-batches that a batch is split into, at most", ge=1)
    schedule: Literal["gpipe", "1f1b", "zero_bubble"] = changeable(
        "1f1b",
        "pipeline schedule; gpipe: all forwards first; 1f1b: one forward, one backward, which stores fewer "
        "activations; zero_bubble: 1f1b that computes weight gradients when a stage would otherwise wait",
    )
    partition: str | list[int] = changeable(
        "auto",
        "layers per stage; auto: the fastest partition by measured layer times; uniform; a list such as [5, 4, 5]; or "
        "package.module:function, which maps a layer's name to its stage",
        allowed="auto, uniform, a list of layers per stage such as [5, 4, 5], or package.module:function",
    )
    recompute: Literal["never", "always", "except_last"] = changeable(
        "never",
        "activation checkpointing: recompute a block's activations in backward; always: for every micro-batch; "
        "except_last: for all but the last",
    )
