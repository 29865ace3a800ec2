"""gloo or MPI: what the compiled library was built with, and which one is chosen."""

from pathlib import Path

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.launch.horovodrun_command import built_with, horovod_library, takes_mpi

# Names as compilers and linkers write them into a library.
GLOO, MPI = b"\0_ZN4gloo9transport3tcp6DeviceE\0", b"\0MPI_Init_thread\0"


@pytest.fixture
def library(tmp_path: Path):
    def make(content: bytes) -> Path:
        file = tmp_path / "mpi_lib_v2.so"
        file.write_bytes(b"\x7fELF horovod_gloo_built horovod_mpi_built" + content)
        return file

    return make


@pytest.mark.parametrize(
    ("content", "gloo", "mpi"),
    [
        (GLOO + MPI, None, False),
        (GLOO, None, False),
        (MPI, None, True),
        (GLOO + MPI, True, False),
        (GLOO + MPI, False, True),
        (MPI, False, True),
    ],
)
def test_gloo_where_it_is_built_unless_another_is_wanted(library, content: bytes, gloo: bool | None, mpi: bool) -> None:
    assert takes_mpi(gloo, library(content)) is mpi


@pytest.mark.parametrize(("content", "gloo", "message"), [
    (GLOO, False, "--mpi: Horovod was built without it here; use --gloo, or rebuild it"),
    (MPI, True, "--gloo: Horovod was built without it here; use --mpi, or rebuild it"),
    (b"", True, "--gloo: Horovod was built without it here; rebuild it"),
])  # fmt: skip
def test_one_that_is_not_built(library, content: bytes, gloo: bool, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}[^\n]*$"):
        takes_mpi(gloo, library(content))


def test_without_horovod_the_wish_stands() -> None:
    assert [takes_mpi(gloo, None) for gloo in (None, True, False)] == [False, False, True]


def test_it_says_what_horovod_says() -> None:
    horovod = pytest.importorskip("horovod.torch", reason="needs Horovod")
    library = horovod_library()
    assert library
    says = {"gloo": horovod.gloo_built(), "mpi": horovod.mpi_built()}
    assert built_with(library) == {name for name, built in says.items() if built}
