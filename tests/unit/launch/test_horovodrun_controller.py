"""gloo or MPI: what the compiled library was built with, and which one is chosen."""

import subprocess
import sys
from pathlib import Path

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.launch import limits
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


def test_mpi_for_more_ranks_than_gloo_connects(library, capsys: pytest.CaptureFixture[str]) -> None:
    both, most = library(GLOO + MPI), limits.GLOO_RANKS
    assert [takes_mpi(None, both, ranks) for ranks in (most, most + 1)] == [False, True]
    assert takes_mpi(True, both, most + 1) is False  # as the user wants
    with pytest.raises(UserError, match=f"^{most + 1} ranks: gloo connects at most {most}, .*; use -np {most}, "):
        takes_mpi(None, library(GLOO), most + 1)
    limits.warn_of_gloo(most)
    assert capsys.readouterr().err == ""
    limits.warn_of_gloo(most + 1)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hvd-transformer: --gloo: {most + 1} ranks may not find each other in time; up to {most}")


def test_a_limit_of_open_files_names_the_number_that_works() -> None:
    assert limits.too_few_files_for_gloo(960, 4096) is None
    assert limits.too_few_files_for_gloo(10_000, -1) is None
    why = limits.too_few_files_for_gloo(961, 4096)
    assert why and why.startswith("its limit of 4096 open files allows gloo at most 960 ranks; ")


def test_the_limit_of_open_files_is_raised_and_counted() -> None:
    """In a process of its own, which may not lower its hard limit again."""
    script = """
import resource
from hvd_transformer.errors import UserError
from hvd_transformer.launch.limits import raise_open_files, require_files_for_hosts
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1256))
assert raise_open_files() == 1256 == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
require_files_for_hosts(200)
try:
    require_files_for_hosts(201)
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "201 hosts: the limit of open files here allows at most 200; raise `ulimit -Hn`\n"


def test_without_horovod_the_wish_stands() -> None:
    assert [takes_mpi(gloo, None) for gloo in (None, True, False)] == [False, False, True]


def test_it_says_what_horovod_says() -> None:
    horovod = pytest.importorskip("horovod.torch", reason="needs Horovod")
    library = horovod_library()
    assert library
    says = {"gloo": horovod.gloo_built(), "mpi": horovod.mpi_built()}
    assert built_with(library) == {name for name, built in says.items() if built}
