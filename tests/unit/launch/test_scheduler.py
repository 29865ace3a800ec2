"""Job files for schedulers: valid by the schedulers' own rules, the same job, every word unchanged, no secrets."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from conftest import REPOSITORY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from job_files import SECRET, TWO_HOSTS, documents, job, written
from jsonschema import Draft202012Validator

from hvd_transformer.cli.launch import launch
from hvd_transformer.errors import UserError
from hvd_transformer.launch.scheduler import compose, kubernetes, scheduled_job, slurm

SCHEDULERS = ("slurm", "kubernetes", "compose")


# ---- the words


def expanded(words: list[str], variable: str) -> list[str]:
    """Words as Kubernetes and compose expand them: two dollar signs become one, and `variable` is a reference."""
    for word in words:
        assert not re.search(variable, word.replace("$$", "")), word
    return [word.replace("$$", "$") for word in words]


def launched_words(scheduler: str, text: str, tmp_path: Path) -> list[str]:
    """The words that the scheduler's side starts; the hosts are h1 and h2."""
    if scheduler == "slurm":
        return run_script(text, tmp_path)
    if scheduler == "kubernetes":
        _, mpijob = documents(text)
        container = mpijob["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
        return expanded(container["args"], r"\$\(")
    role, *words = expanded(documents(text)[0]["services"]["launcher"]["command"], r"\$")
    assert role == "launcher"
    return words


# Stands in for a command: writes its words, each with a zero byte behind it, to a file called as it and the first one.
STUB = """#!/bin/sh
printf '%s\\0' "${0##*/}" "$@" >"$STUB_FOLDER/${0##*/}-$1"
"""
# To requeue a job, Slurm ends it first.
SCONTROL = STUB + '[ "$1" = show ] && printf "h1\\nh2\\n"\n[ "$1" != requeue ] || kill -TERM "$PPID"\n'
# As `launch` does: what asks it to end is passed on.
WAITS = STUB + "sleep 20 & trap 'kill $!; exit 3' TERM\necho ready; wait\n"


def start_script(text: str, folder: Path, launcher: str = STUB) -> subprocess.Popen[str]:
    """The batch script as slurmd starts it, with stand-ins for Slurm's commands and for ours beside this Python."""
    commands, called = folder / "bin", folder / "called"
    for path in (commands, called):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    for name, content in {"hvd-transformer": launcher, "scontrol": SCONTROL}.items():
        (commands / name).write_text(content)
        (commands / name).chmod(0o755)
    (folder / "script").write_text(re.sub(r"^PATH=.*", f"PATH={commands}:$PATH", text, flags=re.MULTILINE))
    values = {"SLURM_JOB_NODELIST": "h[1-2]", "SLURM_JOB_ID": "77", "STUB_FOLDER": str(called)}
    return subprocess.Popen(
        ["bash", folder / "script"],
        env={**os.environ, **values},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def call(folder: Path, name: str) -> list[str]:
    """The words of a stand-in's call; none where it was not called so."""
    file = folder / "called" / name
    return file.read_bytes().decode().split("\0")[:-1] if file.exists() else []


def run_script(text: str, folder: Path) -> list[str]:
    """The words that our command is given."""
    assert start_script(text, folder).wait(20) == 0
    return call(folder, "hvd-transformer-launch")


HOST_OPTIONS = {
    "slurm": ["-H", "h1:2,h2:2"],
    "kubernetes": ["--hostfile", "/etc/mpi/hostfile", "--ssh-identity", "/keys/launcher/id_rsa"],
    "compose": ["-H", "worker-1:2,worker-2:2"],
}
MAKE = {"slurm": slurm.script, "kubernetes": kubernetes.manifest, "compose": compose.services}
WORDS = st.lists(st.one_of(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
                           st.text(alphabet="$(){}A '\"\\`\n#=~é:%&*!|>-?1e")))  # fmt: skip


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=WORDS)
def test_every_word_arrives_unchanged(tmp_path: Path, scheduler: str, words: list[str]) -> None:
    text = MAKE[scheduler](job(*words))
    behind = ["--", *words] if words else []
    assert launched_words(scheduler, text, tmp_path) == [
        "hvd-transformer", "launch", "-np", "4", *HOST_OPTIONS[scheduler], "--gloo", *behind,
    ]  # fmt: skip


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_it_is_the_same_job(tmp_path: Path, scheduler: str) -> None:
    """Every given option has the same meaning where the job file runs."""
    key = tmp_path / "key"
    key.write_text("")
    given_words = [
        *TWO_HOSTS, "--mpi", "--ssh-port", "2200", "--ssh-identity", str(key), "--network-interface", "eth0",
        "--env", "TOKEN", "--env", "OTHER", "--timeline", "a b.json", "--autotune",
        "--restarts", "3", "--min-np", "2", "--no-preflight",
        "--", "--preset", "python-docs", "output_dir=runs/four ranks",
    ]  # fmt: skip
    words = launched_words(scheduler, written(scheduler, *given_words), tmp_path)
    assert words[:2] == ["hvd-transformer", "launch"]
    here, there = (launch.make_context("launch", list(line)).params for line in (given_words, words[2:]))
    differ = {name for name in here if here[name] != there[name]}
    assert differ == {"slurm": set(), "kubernetes": {"hosts", "hostfile"}, "compose": {"hosts"}}[scheduler]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_no_secret_is_in_the_file(scheduler: str) -> None:
    text = written(scheduler, *TWO_HOSTS, "--env", "TOKEN")
    assert SECRET not in text
    if scheduler == "slurm":  # sbatch takes the submitting shell's environment along
        assert "#SBATCH --export=ALL\n" in text
    elif scheduler == "kubernetes":
        spec = documents(text)[1]["spec"]["mpiReplicaSpecs"]
        reference = {"secretKeyRef": {"name": "default-env", "key": "TOKEN"}}
        assert spec["Launcher"]["template"]["spec"]["containers"][0]["env"] == [
            {"name": "TOKEN", "valueFrom": reference}
        ]
    else:
        assert documents(text)[0]["services"]["launcher"]["environment"][-1] == "TOKEN"


# ---- Slurm

# sbatch(1), Slurm 24.05: the options that a script may hold and that these scripts could want.
SBATCH = re.findall(r"[\w-]+", """
account array begin chdir comment constraint cpus-per-gpu cpus-per-task deadline dependency distribution error exclude
exclusive export gpu-bind gpus gpus-per-node gpus-per-task gres hint job-name kill-on-invalid-dep licenses mail-type
mail-user mem mem-per-cpu mem-per-gpu mincpus no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core
ntasks-per-node ntasks-per-socket open-mode output overcommit parsable partition prefer priority qos quiet requeue
reservation signal spread-job switches threads-per-core time time-min tmp tres-per-task use-min-nodes wait
wait-all-nodes wckey""")  # fmt: skip


def sbatch_options(text: str) -> dict[str, str]:
    """Those that sbatch reads: it stops at the first command."""
    head = text.partition("\nset -euo pipefail\n")[0]
    assert all(not line or line.startswith("#") for line in head.splitlines())
    pairs = [line.removeprefix("#SBATCH --").partition("=") for line in head.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in pairs}


@pytest.mark.parametrize("words", [[], ["--", "training.device=cuda", "parallel.pipeline=2"]])
def test_the_batch_script_is_one(tmp_path: Path, words: list[str]) -> None:
    text = written("slurm", *TWO_HOSTS, *words)
    options = sbatch_options(text)
    assert set(options) <= set(SBATCH)
    assert (options["nodes"], options["ntasks-per-node"]) == ("2", "2")
    assert options.get("gpus-per-node") == ("4" if words else None)  # two ranks of two stages
    assert options["cpus-per-task"] == ("4" if words else "2")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("number", "again"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)], ids=["its time ends", "scancel"]
)
def test_the_ranks_save_and_the_job_goes_on_unless_it_is_cancelled(
    tmp_path: Path, number: signal.Signals, again: bool
) -> None:
    assert interrupted(tmp_path, number) == again


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_right_after_the_start_reaches_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    assert interrupted(tmp_path, number, pause="sleep 1") == (number == signal.SIGUSR1)


def interrupted(folder: Path, number: signal.Signals, pause: str = "") -> bool:
    """Whether a job that gets this signal queues itself again. `pause`: where a slow host's shell is held up."""
    text = slurm.script(job(output_dir=str(folder / "a run")))
    assert text.count("launcher=$!\n") == 1
    script = start_script(text.replace("launcher=$!\n", f"{pause}\nlauncher=$!\n"), folder, WAITS)
    assert script.stdout
    assert script.stdout.readline() == "ready\n"
    script.send_signal(number)
    assert script.wait(10) == 3
    assert "No such process" not in script.stdout.read()
    called = call(folder, "scontrol-requeue")
    assert called in ([], ["scontrol", "requeue", "77"])
    return bool(called)


def test_what_forbids_to_resume_holds_for_the_first_start_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a job that was queued again would be refused: by then it has checkpoints."""
    never = job("checkpoint.resume=never", checkpoint={"resume": "never"})
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    assert run_script(slurm.script(never), tmp_path)[-1] == "checkpoint.resume=never"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run_script(slurm.script(never), tmp_path)[-2:] == ["checkpoint.resume=never", "checkpoint.resume=auto"]
    assert run_script(slurm.script(job("seed=1")), tmp_path)[-1] == "seed=1"


def test_a_job_that_saves_nothing_is_not_queued_for_ever(tmp_path: Path) -> None:
    latest = tmp_path / "a run" / "checkpoints" / "latest"
    assert [interrupted(tmp_path, signal.SIGUSR1) for _ in range(5)] == [True, True, True, False, False]
    latest.parent.mkdir(parents=True)
    latest.symlink_to("step-00000010")
    assert [interrupted(tmp_path, signal.SIGUSR1) for _ in range(4)] == [True, True, True, False]
    latest.unlink()
    latest.symlink_to("step-00000020")
    assert interrupted(tmp_path, signal.SIGUSR1)


@pytest.mark.parametrize(("words", "save"), [([], 120), (["--save-timeout", "5m"], 300)])
def test_there_is_time_to_save_before_the_end(words: list[str], save: int) -> None:
    name, seconds = sbatch_options(written("slurm", *TWO_HOSTS, *words))["signal"].split("@")
    assert name == "B:USR1"
    assert int(seconds) >= save + 60
    assert f"stop_grace_period: {save + 30}s" in written("compose", *TWO_HOSTS, *words)
    assert f"terminationGracePeriodSeconds: {save + 30}" in written("kubernetes", *TWO_HOSTS, *words)


def test_a_finished_job_is_not_queued_again_and_a_failed_one_keeps_its_code(tmp_path: Path) -> None:
    for code in (0, 75):
        assert start_script(slurm.script(job()), tmp_path, f"{STUB}exit {code}\n").wait(10) == code
        assert call(tmp_path, "scontrol-requeue") == []


# ---- Kubernetes (test_kubernetes.py has more) and compose


@pytest.mark.parametrize(
    "output", ["/", "/etc/x", "/usr/local/x", "/home", "/home/", "//var", "../..", "runs/../../etc"]
)
@pytest.mark.parametrize("scheduler", ["kubernetes", "compose"])
def test_no_volume_hides_the_containers_system(scheduler: str, output: str) -> None:
    with pytest.raises(UserError, match=r"^output_dir=.*: a system folder of the containers; choose another one"):
        MAKE[scheduler](job(output_dir=output))


@pytest.mark.parametrize("scheduler", ["kubernetes", "compose"])
def test_no_volume_is_in_a_home_folder(scheduler: str) -> None:
    with pytest.raises(UserError, match=r"^output_dir=~/runs/x: containers have another home folder; give a full or a"):
        MAKE[scheduler](job(output_dir="~/runs/x"))


@pytest.mark.parametrize("scheduler", ["kubernetes", "compose"])
def test_no_volume_has_a_colon_in_its_path(scheduler: str) -> None:
    with pytest.raises(UserError, match=r"^output_dir=/data/10:30: the path of a volume has no colon"):
        MAKE[scheduler](job(output_dir="/data/10:30"))
    MAKE[scheduler](job(output_dir="runs/10:30"))  # its volume is /work


@pytest.mark.parametrize(
    ("words", "threads"),
    [
        (TWO_HOSTS, ["OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"]),
        (["-H", "h1:2"], []),  # as many as the cores of the machine have room for
        ([*TWO_HOSTS, "--env", "OMP_NUM_THREADS"], ["OMP_NUM_THREADS"]),
        ([*TWO_HOSTS, "--", "training.device=cuda"], []),
    ],
)
def test_the_workers_of_compose_share_the_cores_of_one_machine(words: list[str], threads: list[str]) -> None:
    (document,) = documents(written("compose", *words))
    environment = document["services"]["launcher"]["environment"]
    assert [entry for entry in environment if entry.startswith("OMP")] == threads


def test_compose_expands_nothing_in_paths() -> None:
    (document,) = documents(compose.services(job(output_dir="/data/$HOME")))
    assert document["services"]["worker-1"]["volumes"][-1] == "/data/$$HOME:/data/$$HOME"


@pytest.mark.parametrize("name", ["runs/Four ranks_ü!", "runs/7", "-", "a" * 200, "runs/..."])
def test_a_name_that_kubernetes_takes(name: str) -> None:
    """It also names a Service, and with `-worker-999` behind it a host."""
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?", job(output_dir=name).name)


@pytest.mark.parametrize("words", [[], ["--env", "TOKEN", "--", "training.device=cuda", "parallel.pipeline=2"]])
def test_the_compose_file_is_valid_and_each_worker_has_its_own_gpus(tmp_path: Path, words: list[str]) -> None:
    text = written("compose", "-np", "5", "-H", "h1:3,h2:2", *words)
    (document,) = documents(text)
    schema = yaml.safe_load((Path(__file__).parent / "schemas" / "compose.yaml").read_text())
    Draft202012Validator({**schema, "$ref": "#/$defs/Compose"}).validate(document)
    services = document["services"]
    assert all(int(service["stop_grace_period"].rstrip("s")) > 120 for service in services.values())
    assert list(services) == ["launcher", "worker-1", "worker-2"]
    assert set(services["launcher"]["depends_on"]) == {"worker-1", "worker-2"}
    devices = [
        service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for service in services.values()
        if "deploy" in service
    ]
    assert devices == ([["0", "1", "2", "3", "4", "5"], ["6", "7", "8", "9"]] if words else [])
    has_compose = (
        shutil.which("docker") and not subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    )
    if has_compose:
        (tmp_path / "compose.yaml").write_text(text)
        subprocess.run(["docker", "compose", "-f", tmp_path / "compose.yaml", "config", "-q"], check=True)


# ---- the command


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_file_is_written_once(tmp_path: Path, scheduler: str) -> None:
    words = ["--scheduler", scheduler, "--output", str(tmp_path / "new"), *TWO_HOSTS]
    done = CliRunner().invoke(launch, words, catch_exceptions=False)
    (file,) = (tmp_path / "new").iterdir()
    assert re.fullmatch(
        rf"{re.escape(str(file))}: written; submit it with: [^\n]*{re.escape(str(file))}[^\n]*\n", done.output
    )
    assert file.read_text() == written(scheduler, *TWO_HOSTS)
    file.write_text("mine")
    with pytest.raises(UserError, match=f"^{file}: already exists; remove it or choose another --output$"):
        CliRunner().invoke(launch, words, catch_exceptions=False)
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scheduler", "slurm"], "--scheduler slurm: needs --output"),
        (["--output", "x"], "--output and --image: only with --scheduler"),
        (["--image", "x"], "--output and --image: only with --scheduler"),
        (["--scheduler", "slurm", "--dry-run", "-H", "a:2,b:4"], "the same number of slots: a:2, b:4"),
        (["--scheduler", "kubernetes", "--dry-run", "-H", "a:2,b,c:2"], "the same number of slots: a:2, b:1, c:2"),
        (["--scheduler", "compose", "--dry-run", "--env", "A=hush"], "--env A=…: takes only the name"),
        (["--scheduler", "compose", "--dry-run", "--", "model.widht=3"], "unknown key"),
        (["--scheduler", "slurm", "--memory-gib", "4"], "--memory-gib: only with --scheduler kubernetes"),
        (["--scheduler", "kubernetes", "--memory-gib", "nan"], "--memory-gib nan: must be above 0"),
        (["--scheduler", "slurm", "--dry-run", "--detach"], "--detach: not with --scheduler, which writes a job file"),
        (["--scheduler", "slurm", "--output", "/proc/none"], "/proc/none/job.sbatch: cannot be written: "),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(launch, words, catch_exceptions=False)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_last_host_may_have_fewer_ranks() -> None:
    assert "-np 3 " in written("slurm", "-np", "3", "-H", "a:2,b:2")
    assert sbatch_options(written("slurm", "-np", "3", "-H", "a:2,b:2"))["ntasks-per-node"] == "2"


# ---- the images


def test_the_images_keep_what_the_files_rely_on() -> None:
    docker = REPOSITORY / "docker"
    dockerfile, entrypoint, sshd = (
        (docker / name).read_text() for name in ("Dockerfile.cpu", "entrypoint.sh", "sshd_config")
    )
    assert re.findall(r"^WORKDIR (\S+)", dockerfile, re.MULTILINE)[-1] == scheduled_job.FOLDER
    assert f"\nARG USER_ID={scheduled_job.GROUP_ID}\n" in dockerfile
    assert f"\nPort {scheduled_job.SSH_PORT}\n" in sshd
    assert f"\nAuthorizedKeysFile {scheduled_job.LAUNCHER_KEY}/authorized_keys\n" in sshd
    assert f"{scheduled_job.WORKER_KEYS}/$HOSTNAME" in entrypoint
    assert re.findall(r"^ +(\w+)\)$", entrypoint, re.MULTILINE)[:2] == ["worker", "launcher"]
    assert "$HOSTS" in entrypoint
    # In an MPIJob no volume has the workers' host keys: a command that asks for them would end every connection.
    if shutil.which("ssh") is None:
        pytest.skip("needs ssh")
    said = subprocess.run(
        ["ssh", "-F", docker / "ssh_config", "-T", "-G", "x-worker-0.x.default.svc"], capture_output=True, text=True
    )
    assert f"port {scheduled_job.SSH_PORT}\n" in said.stdout
    assert "knownhostscommand" not in said.stdout
