"""How a container's entry point ends: the script itself, with stand-ins for sshd and ssh-keygen."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import REPOSITORY
from waiting import wait_until

KEYGEN = """#!/bin/sh
for last; do :; done
echo ssh-ed25519 AAAA >"$last"
echo ssh-ed25519 AAAA >"$last.pub"
"""


class Worker:
    """A worker whose sshd is the shell script `sshd`. No process of this machine looks like an agent to it."""

    def __init__(self, folder: Path, sshd: str) -> None:
        for name in ("home/.ssh", "keys/launcher", "keys/workers", "bin", "proc"):
            (folder / name).mkdir(parents=True)
        for name, text in {"ssh-keygen": KEYGEN, "sshd": f"#!/bin/sh\n{sshd}\n"}.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        script = (REPOSITORY / "docker" / "entrypoint.sh").read_text(encoding="utf-8")
        for path in ("/usr/sbin/", "/keys/", "/proc/"):
            assert path in script
            script = script.replace(path, f"{folder}/{path.strip('/').replace('usr/sbin', 'bin')}/")
        (folder / "entrypoint.sh").write_text(script)
        environment = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": f"{folder}/home"}
        self.process = subprocess.Popen(
            ["bash", folder / "entrypoint.sh", "worker"], env=environment, cwd=folder, stderr=subprocess.PIPE, text=True
        )

    def code(self) -> int:
        error = self.process.communicate(timeout=20)[1]
        assert "unbound" not in error and "command not found" not in error, error
        return self.process.returncode


@pytest.mark.parametrize("sshd", ["exit 255", "sleep 0.5; exit 255"])
def test_a_worker_whose_sshd_fails_fails(tmp_path: Path, sshd: str) -> None:
    """At once, as with a wrong configuration, or later."""
    assert Worker(tmp_path, f"echo no hostkeys available >&2; {sshd}").code() == 255


@pytest.mark.parametrize("end", ["exit 0", "exit 3", "kill -9 $$"])
def test_a_worker_that_is_asked_to_leave_has_not_failed(tmp_path: Path, end: str) -> None:
    worker = Worker(tmp_path, f"trap '{end}' TERM; touch ready; while :; do sleep 0.05; done")
    wait_until((tmp_path / "ready").exists)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.code() == 0


def test_a_worker_lasts_as_long_as_its_sshd(tmp_path: Path) -> None:
    worker = Worker(tmp_path, "until [ -e end ]; do sleep 0.05; done")
    with pytest.raises(subprocess.TimeoutExpired):
        worker.process.wait(1.0)
    (tmp_path / "end").touch()
    assert worker.code() == 0
