"""What the hosts' answers mean for the devices of a job: what would be refused is a problem, what is slow a note."""

from typing import Any

import pytest
from click.testing import CliRunner

from hvd_transformer.cli.doctor import doctor
from hvd_transformer.config import load
from hvd_transformer.errors import UserError
from hvd_transformer.launch.doctor import examine
from hvd_transformer.launch.doctor.device_findings import about_devices
from hvd_transformer.launch.doctor.findings import Finding, Job
from hvd_transformer.launch.horovodrun_command import Horovodrun, check_devices
from hvd_transformer.launch.hostfile import parse_hostfile, parse_hosts

GPU = {"name": "GPU"}


def answer(gpus: int = 0, torch: str = "2.13.0+cu130", features: str = "gloo NCCL", **more: Any) -> dict[str, Any]:
    devices = {"devices": [GPU] * gpus, "all_devices": [GPU] * gpus}
    built = {"versions": {"torch": torch}, "horovod": {"features": features.split()}}
    return {**devices, **built, "cores": 64, "number_formats": [], **more}


def job(hosts: str, *settings: str) -> Job:
    return Job.of(Horovodrun(parse_hosts(hosts)), load(None, None, [*settings, "output_dir=runs/x"]))


def told(findings: list[Finding]) -> list[tuple[str, str]]:
    return [("problem" if finding.problem else "note", str(finding)) for finding in findings]


def found(wanted: Job, *answers: dict[str, Any], local: str = "") -> list[tuple[str, str]]:
    """Problems and notes; the answers are those of the job's hosts, in order."""
    by_host = {host.name: given for host, given in zip(wanted.hosts, answers, strict=True)}
    return told(list(about_devices(wanted, by_host, local.split())))


@pytest.mark.parametrize(
    ("settings", "devices", "short"),
    [
        (["training.device=cuda"], 2, None),
        (["training.device=cuda"], 1, "1 GPU for 2 slots × 1 stage; give it 1 slot"),
        (["training.device=cuda", "parallel.pipeline=2"], 4, None),
        (["training.device=cuda", "parallel.pipeline=2"], 3, "3 GPUs for 2 slots × 2 stages; give it 1 slot"),
        (["training.device=cuda", "parallel.pipeline=2"], 1, "1 GPU for 2 slots × 2 stages; leave this host out"),
        (["training.device=auto"], 2, None),
        (["training.device=auto"], 0, "0 GPUs for 2 slots × 1 stage; leave this host out"),
        (["training.device=cpu"], 0, None),
    ],
)
def test_devices_are_those_of_all_slots_and_stages(settings: list[str], devices: int, short: str | None) -> None:
    """The other hosts have enough GPUs."""
    wanted = [] if short is None else [("problem", f"host c: {short}, or set training.device=cpu")]
    assert found(job("a:2,b:2,c:2", *settings), answer(8), answer(8), answer(devices)) == wanted


def test_too_few_devices_everywhere_mean_the_cpu_unless_gpus_are_asked_for() -> None:
    [note] = found(job("a:2"), answer(1))
    assert note == (
        "note",
        "host a: 1 GPU for 2 slots × 1 stage: all ranks will compute on the CPU; start fewer ranks to use the GPUs",
    )
    [problem] = found(job("a:2", "training.device=cuda"), answer(1))
    assert problem[0] == "problem"


def test_few_cores_are_worth_a_note() -> None:
    assert found(job("a:2", "training.device=cpu"), answer(2, cores=1)) == [
        ("note", "host a: 1 core for 2 slots × 1 stage; give it 1 slot for speed")
    ]


@pytest.mark.parametrize(
    ("settings", "formats", "names"),
    [
        ("training.precision=bf16", ["bf16"], []),
        ("training.precision=bf16", [], ["c"]),
        ("training.precision=fp16", ["bf16"], ["c"]),
        ("training.precision=fp32", [], []),
    ],
)
def test_a_cpu_without_instructions_for_the_precision_is_named(
    settings: str, formats: list[str], names: list[str]
) -> None:
    wanted, both = job("a:2,b:2,c:2", settings), ["bf16", "fp16"]

    def notes(gpus: int) -> list[tuple[str, str]]:
        others = [answer(gpus, number_formats=both)] * 2
        return [(kind, text[:7]) for kind, text in found(wanted, *others, answer(gpus, number_formats=formats))]

    assert notes(gpus=0) == [("note", f"host {name}:") for name in names]
    assert notes(gpus=2) == []


def test_a_torch_for_cpus_uses_no_gpu() -> None:
    with_gpus, useless = answer(2, torch="2.13.0+cpu"), "host a: 2 GPUs, but torch 2.13.0+cpu is built for CPUs"
    assert found(job("a:2", "training.device=cuda"), with_gpus) == [
        ("problem", f"{useless}; install torch for CUDA there, or set training.device=cpu")
    ]
    note = ("note", f"{useless}: all ranks will compute on the CPU; install torch for CUDA there")
    assert found(job("a:2"), with_gpus) == [note]
    assert found(job("a:4"), with_gpus) == [note]  # with fewer ranks they would not use the GPUs either
    assert found(job("a:1"), with_gpus) == [note]
    assert found(job("a:2", "training.device=cpu"), with_gpus) == []
    assert found(job("a:2"), answer(torch="2.13.0+cpu")) == []


def test_a_torch_for_cpus_makes_notes_on_the_cpu_true() -> None:
    slow = found(job("a:2", "training.precision=bf16"), answer(2, torch="2.13.0+cpu", cores=1))
    assert [kind for kind, _ in slow] == ["note"] * 3
    assert any("1 core for 2 slots" in text for _, text in slow)
    assert any("no bf16 instructions" in text for _, text in slow)


WITHOUT_NCCL = "Horovod is built without NCCL: several ranks cannot compute on the GPUs"


@pytest.mark.parametrize(("features", "lacks"), [("gloo MPI", True), ("NCCL", False), ("MPI on GPUs", False)])
def test_ranks_on_gpus_need_a_horovod_that_sends_from_them(features: str, lacks: bool) -> None:
    rebuild = "rebuild it with HOROVOD_GPU_OPERATIONS=NCCL"
    two, given = job("a:2"), answer(2, horovod={"features": [features] if "GPUs" in features else features.split()})
    assert found(two, given) == [("note", f"host a: {WITHOUT_NCCL}; {rebuild}")] * lacks
    assert (
        found(job("a:2", "training.device=cuda"), given)
        == [("problem", f"host a: {WITHOUT_NCCL}; {rebuild}, or set training.device=cpu")] * lacks
    )
    assert (
        found(job("a:1,b:1", "training.device=cuda"), given, answer(1))[:1]
        == [("problem", f"host a: {WITHOUT_NCCL}; {rebuild}, or set training.device=cpu")] * lacks
    )


def test_one_rank_sends_from_no_gpu() -> None:
    for device in ("auto", "cuda"):
        for stages in (1, 2):
            one = job("a:1", f"training.device={device}", f"parallel.pipeline={stages}")
            assert found(one, answer(2, features="gloo")) == []
    assert [kind for kind, _ in found(job("a:1")._replace(is_given=False), answer(2, features="gloo"))] == ["note"]


def test_ranks_on_cpus_need_no_nccl() -> None:
    assert found(job("a:2", "training.device=cpu"), answer(2, features="gloo")) == []


def test_a_quick_answer_does_not_know_horovod() -> None:
    quick = {key: value for key, value in answer(2).items() if key != "horovod"}
    assert found(job("a:2", "training.device=cuda"), quick) == []


@pytest.mark.parametrize("device", ["auto", "cuda", "cpu"])
@pytest.mark.parametrize(
    ("gpus", "slots", "stages", "cure"),
    [
        (2, 2, 1, None),
        (2, 3, 1, "give it 2 slots, or set training.device=cpu"),
        (3, 2, 2, "give it 1 slot, or set training.device=cpu"),
        (1, 1, 2, "set training.device=cpu"),
    ],
)
def test_what_launch_refuses_on_its_own_host_is_a_problem(
    device: str, gpus: int, slots: int, stages: int, cure: str | None
) -> None:
    """Also with training.device=auto; of other hosts it does not know the GPUs."""
    settings = [f"training.device={device}", f"parallel.pipeline={stages}"]
    wanted, config = job(f"localhost:{slots}", *settings), load(None, None, settings)
    problems = [text for kind, text in found(wanted, answer(gpus), local="localhost") if kind == "problem"]
    if cure is None or device == "cpu":
        assert problems == []
        check_devices(wanted.hosts, config, {"CUDA_VISIBLE_DEVICES": "0,1,2"[: 2 * gpus - 1]})
    else:
        [problem] = problems
        assert problem.endswith(f"; {cure}")
        with pytest.raises(UserError, match=f"^host localhost: has {gpus} GPUs? for {slots} rank"):
            check_devices(wanted.hosts, config, {"CUDA_VISIBLE_DEVICES": "0,1,2"[: 2 * gpus - 1]})
    if device == "auto":
        elsewhere = job(f"192.0.2.1:{slots}", *settings)
        assert [kind for kind, _ in found(elsewhere, answer(gpus))] == ["note"] * (cure is not None)
        check_devices(elsewhere.hosts, config, {"CUDA_VISIBLE_DEVICES": "0,1,2"[: 2 * gpus - 1]})


def test_this_host_without_gpus_computes_on_the_cpu() -> None:
    assert found(job("localhost:2"), answer(), local="localhost") == []


def test_too_few_named_gpus_are_a_problem_on_any_host() -> None:
    hosts = parse_hostfile("a slots=2 gpus=0,1", "hosts")
    wanted = job("a:2", "parallel.pipeline=2")._replace(hosts=hosts)
    given = answer(4, devices=[GPU] * 2)
    assert found(wanted, given) == [
        ("problem", "host a: 2 GPUs for 2 slots × 2 stages; give it 1 slot, or set training.device=cpu")
    ]


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("line", "gpus", "seen", "message"),
    [
        ("localhost gpus=5", 2, 0, "gpus=5: it has only 2 GPUs; check `nvidia-smi` there, or name other GPUs"),
        ("localhost gpus=0,5", 2, 1, "gpus=0,5: it has only 2 GPUs; check `nvidia-smi` there, or name other GPUs"),
        ("localhost gpus=1", 1, 0, "gpus=1: it has only 1 GPU; check `nvidia-smi` there, or name other GPUs"),
        ("localhost slots=2 gpus=0,1", 0, 0, "gpus=0,1: it has 0 GPUs; check `nvidia-smi` there"),
    ],
)
def test_named_gpus_that_are_not_there_are_one_finding(
    device: str, line: str, gpus: int, seen: int, message: str
) -> None:
    wanted = job("localhost", f"training.device={device}")._replace(hosts=parse_hostfile(line, "hosts"))
    given = answer(gpus, devices=[GPU] * seen)
    # Without nvidia-smi there may be GPUs all the same.
    kind = "note" if device == "auto" and not gpus else "problem"
    finding = (kind, f"host localhost: {message}, or set training.device=cpu")
    assert found(wanted, given, local="localhost") == [finding]
    on_cpus = wanted._replace(device="cpu")
    assert found(on_cpus, given, local="localhost") == []


def test_the_only_host_is_not_left_out() -> None:
    cuda, bf16 = "training.device=cuda", "training.precision=bf16"
    assert found(job("a:1", cuda), answer()) == [
        ("problem", "host a: 0 GPUs for 1 slot × 1 stage; set training.device=cpu")
    ]
    assert [text.partition("; ")[2] for _, text in found(job("a:1,b:1", cuda), answer(), answer(1))] == [
        "leave this host out, or set training.device=cpu"
    ]
    assert [text.partition("; ")[2] for _, text in found(job("a:1", bf16), answer())] == ["set training.precision=fp32"]
    assert [text.partition("; ")[2] for _, text in found(job("a:1,b:1", bf16), answer(), answer())] == [
        "set training.precision=fp32, or leave this host out"
    ] * 2


def test_hosts_alone_are_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Job] = []

    def stop(wanted: Job, *_: object) -> None:
        asked.append(wanted)
        raise UserError("enough")

    monkeypatch.setattr(examine, "examine", stop)
    for words in (["-H", "a:1"], ["-H", "a:1", "--", "output_dir=runs/x"]):
        CliRunner().invoke(doctor, words)
    assert [wanted.is_given for wanted in asked] == [False, True]
