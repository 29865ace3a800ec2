"""The two Dockerfiles are one text below their arguments."""

from conftest import REPOSITORY


def test_the_gpu_image_differs_from_the_cpu_image_in_its_arguments_alone():
    cpu, gpu = ((REPOSITORY / "docker" / f"Dockerfile.{kind}").read_text().partition("\n\n") for kind in ("cpu", "gpu"))
    assert "HOROVOD_GPU_OPERATIONS=NCCL" in gpu[0]
    assert gpu[0] != cpu[0]
    assert gpu[2] == cpu[2]
