"""What the hosts' answers mean for the devices of a job: GPUs, a torch and a Horovod that can use them, or CPUs."""

from collections.abc import Collection, Iterator

from hvd_transformer.errors import counted
from hvd_transformer.launch.doctor.findings import Answer, Answers, Finding, Job
from hvd_transformer.launch.hostfile import Host


def about_devices(job: Job, answers: Answers, local: Collection[str] = ()) -> Iterator[Finding]:
    """With training.device=auto, one missing GPU anywhere makes all ranks compute on the CPU.

    `local`: the names of hosts that are this machine.
    """
    hosts = [host for host in job.hosts if host.name in answers]
    enough = any(_num_gpus(answers[host.name]) >= host.slots * job.stages for host in hosts)
    wants_gpus = job.device == "cuda" or (job.device == "auto" and enough)
    for_cpus = any(_is_for_cpus(answers[host.name]) for host in hosts)
    on_cpus = not wants_gpus or (job.device == "auto" and for_cpus)
    for host in hosts:
        if job.device != "cpu":
            yield from _gpus(job, host, answers[host.name], wants_gpus, host.name in local)
        if on_cpus:
            yield from _cpus(job, host, answers[host.name])
    yield from _horovod(job, answers)


def _gpus(job: Job, host: Host, answer: Answer, wants_gpus: bool, local: bool) -> Iterator[Finding]:
    """Whether the host has the GPUs that its ranks need, and a torch that can use them."""
    there, stages = _num_gpus(answer), job.stages
    gpus, slots = counted(there, "GPU"), f"{counted(host.slots, 'slot')} × {counted(stages, 'stage')}"
    if there < len(host.gpus):
        yield _not_there(job, host, len(answer["all_devices"]))
        return
    lacking = there < host.slots * stages
    # `launch` counts the GPUs of its own host and those that gpus= names, and refuses too few of them even with auto.
    refused = there > 0 and (local or bool(host.gpus))
    if lacking and (wants_gpus or refused):
        fewer = [f"give it {counted(there // stages, 'slot')}"] if there >= stages else _leave_out(job)
        yield Finding(host.name, f"{gpus} for {slots}", ", or ".join([*fewer, "set training.device=cpu"]))
    if there and _is_for_cpus(answer):
        useless = f"{gpus}, but torch {answer['versions']['torch']} is built for CPUs"
        cure = "install torch for CUDA there"
        if job.device == "cuda":
            yield Finding(host.name, useless, f"{cure}, or set training.device=cpu")
        else:
            yield Finding(host.name, f"{useless}: all ranks will compute on the CPU", cure, problem=False)
    elif lacking and there and not wants_gpus and not refused:
        message = f"{gpus} for {slots}: all ranks will compute on the CPU"
        yield Finding(host.name, message, "start fewer ranks to use the GPUs", problem=False)


def _not_there(job: Job, host: Host, there: int) -> Finding:
    message = f"gpus={','.join(map(str, host.gpus))}: it has {'only ' if there else ''}{counted(there, 'GPU')}"
    cures = ["check `nvidia-smi` there", *(["name other GPUs"] if there else []), "set training.device=cpu"]
    # Where nvidia-smi tells of none, there may be GPUs all the same: with auto the ranks look for themselves.
    return Finding(host.name, message, ", or ".join(cures), problem=there > 0 or job.device == "cuda")


def _cpus(job: Job, host: Host, answer: Answer) -> Iterator[Finding]:
    """What slows a job down that computes on CPUs."""
    cores, precision = answer["cores"], job.precision
    if cores < host.slots * job.stages:
        message = f"{counted(cores, 'core')} for {counted(host.slots, 'slot')} × {counted(job.stages, 'stage')}"
        fewer = f"give it {counted(max(1, cores // job.stages), 'slot')} for speed"
        yield Finding(host.name, message, fewer, problem=False)
    if precision in ("bf16", "fp16") and precision not in answer["number_formats"]:
        message = f"its CPU has no {precision} instructions: training.precision={precision} is slow there"
        cure = ", or ".join(["set training.precision=fp32", *_leave_out(job)])
        yield Finding(host.name, message, cure, problem=False)


def _horovod(job: Job, answers: Answers) -> Iterator[Finding]:
    """Ranks on GPUs need a Horovod that sends from them; a job of one rank needs none."""
    if job.device == "cpu" or (job.is_given and sum(host.slots for host in job.hosts) == 1):
        return
    only_gpus = job.device == "cuda"
    cure = "rebuild it with HOROVOD_GPU_OPERATIONS=NCCL" + (", or set training.device=cpu" if only_gpus else "")
    for host, answer in answers.items():
        horovod = answer.get("horovod")  # a quick answer has none
        if horovod is not None and _num_gpus(answer) and not {"NCCL", "MPI on GPUs"} & set(horovod["features"]):
            message = "Horovod is built without NCCL: several ranks cannot compute on the GPUs"
            yield Finding(host, message, cure, problem=only_gpus)


def _leave_out(job: Job) -> list[str]:
    """A cure, unless this is the job's only host."""
    return ["leave this host out"] if len(job.hosts) > 1 else []


def _num_gpus(answer: Answer) -> int:
    """The GPUs that the job's ranks see there."""
    return len(answer["devices"])


def _is_for_cpus(answer: Answer) -> bool:
    return str(answer["versions"]["torch"]).endswith("+cpu")
