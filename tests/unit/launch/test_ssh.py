"""The command line of ssh, as the installed ssh reads it."""

import shutil
import subprocess

import pytest

from hvd_transformer.launch.connection.ssh import Ssh, ssh_command


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
@pytest.mark.parametrize(("seconds", "expected"), [(0.5, 1), (2.0, 1), (8.0, 6), (30.0, 10), (3600.0, 10)])
def test_ssh_gives_up_before_the_launcher_does(seconds: float, expected: int) -> None:
    command = ssh_command(Ssh(), "h2.invalid", ["true"], seconds)
    shown = subprocess.run([command[0], "-G", *command[1:]], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert f"connecttimeout {expected}" in shown.stdout.splitlines()
