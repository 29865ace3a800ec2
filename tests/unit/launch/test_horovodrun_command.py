"""The horovodrun command line of a job, and its environment."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import REPOSITORY

from hvd_transformer.cli.launch import launch
from hvd_transformer.errors import UserError
from hvd_transformer.launch.connection.ssh import Ssh
from hvd_transformer.launch.horovodrun_command import Horovodrun, launcher_environment, secret_values
from hvd_transformer.launch.hostfile import Host, parse_hosts

HOSTS = [Host("h1", 2), Host("h2", 2)]


def test_the_plain_command() -> None:
    assert Horovodrun(HOSTS).words(["hvd-train", "seed=3"]) == [
        "horovodrun", "-np", "4", "-H", "h1:2,h2:2", "--gloo", "--disable-cache", "--start-timeout", "34",
        "hvd-train", "seed=3",
    ]  # fmt: skip


def test_every_option(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("")
    words = Horovodrun(HOSTS, True, Ssh(2222, key), "eth0,ib0", Path("line.json"), True).words(["hvd-train"])
    text = " ".join(words)
    assert " --mpi " in text
    assert "--gloo" not in text
    assert f" --ssh-port 2222 --ssh-identity-file {key} --network-interfaces eth0,ib0 " in text
    assert text.endswith(" --timeline-filename line.json --autotune hvd-train")


def test_more_hosts_get_more_time_to_start() -> None:
    def seconds(hosts: str) -> int:
        words = Horovodrun(parse_hosts(hosts)).words([])
        return int(words[words.index("--start-timeout") + 1])

    assert seconds("n1") < seconds("n[1-10]") < seconds("n[1-200]")


def refused(**options: object) -> str:
    with pytest.raises(UserError) as caught:
        Horovodrun(**{"hosts": HOSTS, **options})  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_what_horovodrun_cannot_take_is_told_before_it_starts() -> None:
    assert refused(hosts=[Host("fe80::1", 2)]).startswith("[fe80::1]: horovodrun knows no IPv6 addresses")
    for name in ("", "eth0;reboot", "eth0 eth1", "eth0,", "$(x)", "a\nb"):
        assert refused(network_interface=name).startswith("--network-interface ")


def test_mpirun_on_other_hosts_takes_no_path_with_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would write this path unquoted into what ssh gives to their shells."""
    monkeypatch.setattr("sys.prefix", "/home/me/my venv")
    with pytest.raises(UserError, match="^--mpi: Open MPI takes no spaces .*, /home/me/my venv, on other hosts"):
        Horovodrun(HOSTS, mpi=True).check_path()
    Horovodrun(HOSTS[:1], mpi=True).check_path()
    Horovodrun(HOSTS).check_path()


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_is_none(port: int) -> None:
    with pytest.raises(UserError, match=f"--ssh-port {port}: must be from 1 to 65535"):
        Ssh(port)


def test_a_key_file_that_cannot_be_read_or_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--ssh-identity .*missing: cannot be read"):
        Ssh(identity=tmp_path / "missing")
    (tmp_path / "my key").write_text("")
    with pytest.raises(UserError, match="no spaces or quotes"):
        Ssh(identity=tmp_path / "my key")


ENVIRONMENT = {
    "PATH": "/usr/bin",
    "HOME": "/home/me",
    "LC_ALL": "C",
    "OMP_NUM_THREADS": "1",
    "HOROVOD_CYCLE_TIME": "3",
    "NCCL_DEBUG": "INFO",
    "UCX_TLS": "tcp",
    "FI_PROVIDER": "tcp",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "SSL_CERT_FILE": "/etc/ca.pem",
    "GLOO_SOCKET_IFNAME": "eth0",
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUDA_MODULE_LOADING": "EAGER",
    "CUDA_HOME": "/usr/local/cuda",  # of this host
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_MCA_btl": "tcp",
    "OMPI_COMM_WORLD_RANK": "0",  # of an mpirun around this one
    "AWS_SECRET_ACCESS_KEY": "secret",
    "WANDB_API_KEY": "secret",
    "https_proxy": "http://me:secret@proxy",
    "NCCL_TOKEN": "secret",
}


def test_nothing_travels_but_the_allowed_and_the_named() -> None:
    named = ["WANDB_API_KEY", "NCCL_TOKEN"]
    given = launcher_environment(ENVIRONMENT, named)
    assert given.pop("PATH") == f"{Path(sys.executable).parent}:/usr/bin"
    allowed = {"HOME", "LC_ALL", "OMP_NUM_THREADS", "HOROVOD_CYCLE_TIME", "NCCL_DEBUG", "UCX_TLS"}
    allowed |= {"FI_PROVIDER", "PYTORCH_CUDA_ALLOC_CONF", "SSL_CERT_FILE", "GLOO_SOCKET_IFNAME"}
    allowed |= {"CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"}
    for name in ("OMPI_MCA_orte_launch_agent", "OPAL_PREFIX"):  # where Open MPI is a Python package
        given.pop(name, None)
    assert given.pop("PYTHONSAFEPATH") == "1"
    assert given.keys() == allowed | {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_btl"}
    secrets = {"WANDB_API_KEY": "secret", "NCCL_TOKEN": "secret", "https_proxy": "http://me:secret@proxy"}
    assert secret_values(ENVIRONMENT, named) == secrets


@pytest.mark.parametrize("name", ["TOKEN=hush", "MISSING", "A B", "", "1A"])
def test_a_named_variable_that_is_none(name: str) -> None:
    with pytest.raises(UserError, match="^--env ") as caught:
        secret_values(ENVIRONMENT, [name])
    assert "hush" not in str(caught.value)


def dry_run(*words: str, **environment: str) -> str:
    """The one line that `launch --dry-run` prints."""
    given = {"CUDA_VISIBLE_DEVICES": "", **environment}
    result = CliRunner(env=given).invoke(launch, [*words, "--dry-run"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) == 1
    return result.output.rstrip("\n")


START = "--gloo --disable-cache --start-timeout"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], f"horovodrun -np 1 -H localhost:1 {START} 32 hvd-train"),
        (["-np", "4"], f"horovodrun -np 4 -H localhost:4 {START} 32 hvd-train"),
        (["-H", "a:2,b"], f"horovodrun -np 3 -H a:2,b:1 {START} 34 hvd-train"),
        (["-np", "2", "-H", "localhost:4"], f"horovodrun -np 2 -H localhost:2 {START} 32 hvd-train"),
        (["-np", "3", "-H", "n[1-9]:2"], f"horovodrun -np 3 -H n1:2,n2:1 {START} 34 hvd-train"),
    ],
)
def test_hosts_and_ranks(words: list[str], line: str) -> None:
    assert dry_run(*words) == line


def test_a_dry_run_of_every_example_host_file() -> None:
    for file in {*(REPOSITORY / "hostfiles").iterdir()} - {REPOSITORY / "hostfiles" / "discover.sh"}:
        assert dry_run("--hostfile", str(file)).startswith("horovodrun -np ")
        assert "-np 2 " in dry_run("--hostfile", str(file), "-np", "2")


def test_a_dry_run_is_quoted_for_a_shell_and_shows_no_secret() -> None:
    result = CliRunner(env={"TOKEN": "hush"}).invoke(
        launch, ["--env", "TOKEN", "--dry-run", "--", "parallel.partition=[5, 4]", "output_dir=a b"]
    )
    assert result.output.endswith("hvd-train 'parallel.partition=[5, 4]' 'output_dir=a b'\n")
    assert "hush" not in result.output


@pytest.mark.parametrize("words", [["training.max_stepss=3"], ["--preset", "nothing"], ["--config", "no-such-file"]])
def test_hvd_trains_arguments_are_checked_first(words: list[str]) -> None:
    result = CliRunner().invoke(launch, ["--dry-run", "--", *words])
    assert isinstance(result.exception, UserError)


def test_two_lists_of_hosts_are_one_too_many() -> None:
    result = CliRunner().invoke(launch, ["-H", "a", "--hostfile", "b", "--dry-run"])
    assert str(result.exception) == "-H and --hostfile: give only one of them"
