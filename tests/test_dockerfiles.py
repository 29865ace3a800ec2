"""The two Dockerfiles are one text below their arguments, and what they copy is there."""

import re
from configparser import ConfigParser

import yaml
from conftest import REPOSITORY

from hvd_transformer.launch.time_limits import TimeLimits

DOCKERFILES = [(REPOSITORY / "docker" / f"Dockerfile.{kind}").read_text(encoding="utf-8") for kind in ("cpu", "gpu")]


def test_the_gpu_image_differs_from_the_cpu_image_in_its_arguments_alone():
    cpu, gpu = (text.partition("\n\n") for text in DOCKERFILES)
    assert "HOROVOD_GPU_OPERATIONS=NCCL" in gpu[0]
    assert gpu[0] != cpu[0]
    assert gpu[2] == cpu[2]


def test_both_images_have_one_system_and_so_one_python():
    """Debian's own: the default of BASE says which, and what is compiled is compiled there."""
    bases = {re.search(r"^ARG BASE=(.*)$", text, re.MULTILINE)[1] for text in DOCKERFILES}
    assert len(bases) == 1
    assert bases.pop().startswith("debian:")
    for text in DOCKERFILES:
        assert "\nARG BUILD_BASE=$BASE\n" in text
        stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", text, re.MULTILINE)
        assert {base for base, _ in stages} - {name for _, name in stages} == {"$BASE", "$BUILD_BASE"}


def test_every_argument_reaches_the_stage_that_needs_it():
    """An argument above the first FROM is empty in a stage that does not name it again."""
    for text in DOCKERFILES:
        head, _, stages = text.partition("\n\n")
        given = set(re.findall(r"^ARG (\w+)", head, re.MULTILINE))
        assert given == {"BASE", "BUILD_BASE", "HOROVOD_GPU_OPERATIONS", "HOROVOD_BUILD_CUDA_CC_LIST"}
        [build] = [stage for stage in stages.split("\nFROM ") if "bash build_horovod.sh" in stage]
        before = build.partition("bash build_horovod.sh")[0]
        assert given - set(re.findall(r"^ARG (\w+)$", before, re.MULTILINE)) == {"BASE", "BUILD_BASE"}


def test_the_gpu_image_has_kernels_for_cards_that_its_cuda_knows():
    """Those of nvcc 13.0 (`nvcc --help`); the last one also becomes PTX, for newer cards."""
    listed = re.search(r"^ARG HOROVOD_BUILD_CUDA_CC_LIST=(.*)$", DOCKERFILES[1], re.MULTILINE)[1]
    architectures = [int(one) for one in listed.split(",")]
    assert architectures == sorted(set(architectures))
    assert set(architectures) <= {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121}
    assert {75, 80, 90, 100} <= set(architectures)  # T4, A100, H100, B200


def test_labels_and_tags_name_the_version_of_the_package():
    config = ConfigParser()
    config.read(REPOSITORY / "setup.cfg", encoding="utf-8")
    package = config["metadata"]
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="(.*)"', DOCKERFILES[0]))
    assert labels.keys() == {"title", "description", "licenses", "version"}
    stated = [labels[name] for name in ("title", "licenses", "version")]
    assert stated == [package[name] for name in ("name", "license", "version")]
    pages = [(REPOSITORY / page).read_text(encoding="utf-8") for page in ("docker/README.md", "docs/docker.md")]
    tags = {tag for page in pages for tag in re.findall(r"hvd-transformer:(\d[\w.]*)-[cg]pu", page)}
    assert tags == {package["version"]}


def test_what_is_copied_into_the_image_is_there_and_not_ignored():
    lines = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line[1:].rstrip("/") for line in lines if line.startswith("!")}
    copied = {
        source.rstrip("/")
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILES[0], re.MULTILINE)
        for source in line.split()[:-1]
    }
    assert {"setup.cfg", "hvd_transformer"} <= copied
    assert all((REPOSITORY / source).exists() for source in copied)
    assert copied == kept


def test_the_image_installs_extras_that_setup_cfg_has():
    """pip only warns of one that is not there."""
    setup = (REPOSITORY / "setup.cfg").read_text(encoding="utf-8")
    groups = re.findall(r"""pip install .*['"]\.\[([^\]]+)\]""", DOCKERFILES[0])
    extras = set(re.findall(r"[a-z]+", " ".join(groups)))
    assert {"distributed", "build", "cuda"} <= extras
    assert any("build${HOROVOD_GPU_OPERATIONS:+,cuda}" in group for group in groups)
    assert all(re.search(rf"^{extra} =$", setup, re.MULTILINE) for extra in extras)


def test_the_cluster_gives_ranks_the_time_to_save():
    services = yaml.safe_load((REPOSITORY / "docker" / "compose.yaml").read_text(encoding="utf-8"))["services"]
    assert all(int(service["stop_grace_period"].removesuffix("s")) > TimeLimits().save for service in services.values())


def test_workers_have_shared_memory_for_nccl():
    """Containers have 64 MB of it."""
    services = yaml.safe_load((REPOSITORY / "docker" / "compose.yaml").read_text(encoding="utf-8"))["services"]
    assert {service["shm_size"] for service in services.values()} == {"1gb"}
    readme = (REPOSITORY / "docker" / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    workers = [line for line in readme.splitlines() if re.match(r"docker run .* worker$", line)]
    assert workers
    assert all(" --shm-size=1g " in line for line in workers)
