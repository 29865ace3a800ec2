"""The keys of the section `communication`."""

from typing import Literal

from hvd_transformer.config.sections.key import OptionalPositive, Section, changeable, fixed


class CommunicationConfig(Section):
    """Gradients over Horovod, and the activations of tensor-parallel layers."""

    bucket_mb: OptionalPositive = changeable(
        None,
        "size of a flat gradient bucket in MiB; each bucket is one allreduce; none: 8 on a CPU, 25 on a GPU, and at "
        "least 0.25 per replica",
    )
    compression: Literal["none", "auto", "fp16", "fp16_fp32_sum", "int8", "int4", "powersgd"] = changeable(
        "none",
        "compression of gradients in transit; fp16: half the bytes, summed by Horovod in fp16, which rounds once per "
        "replica; fp16_fp32_sum: the same bytes, summed in fp32; int8: a quarter; int4: an eighth; powersgd: factors "
        "of low rank, which learn more slowly; auto: none, fp16, int8 or int4, whichever suits the link",
    )
    powersgd_rank: int = changeable(4, "rank of the factors of compression=powersgd", ge=1)
    overlap: bool = changeable(True, "send each bucket as soon as it is full, while backward continues")
    embedding_rows: Literal["auto", "always", "never"] = changeable(
        "auto",
        "send the gradient of an embedding as one row per token instead of a matrix of the vocabulary's size; "
        "auto: if a step has fewer tokens than the vocabulary",
    )
    local_steps: int = fixed(
        1,
        "steps that each replica takes on its own before its weights and those of the others are averaged (DiLoCo), "
        "after optimizer.warmup_steps; not the same mathematics, and lr is not scaled with the replicas; 1: all "
        "replicas average every gradient",
        ge=1,
    )
    outer_lr: float = fixed(0.7, "learning rate of the averaged weights, for local_steps", gt=0)
    outer_momentum: float = fixed(0.9, "Nesterov momentum of the averaged weights, for local_steps", ge=0, lt=1)
    tensor_backend: Literal["auto", "horovod", "torch"] = changeable(
        "auto",
        "what sums the activations of tensor-parallel ranks: horovod; torch: torch.distributed, over gloo between CPUs "
        "and over NCCL between GPUs, where no layer waits on the CPU; auto: torch over NCCL where that is possible, "
        "otherwise horovod",
    )
