"""In CI a test that is skipped for a reason that is not on the list fails the session."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REASONS = ["needs root, to be another user", "root may write everywhere"]
OWN, ANOTHERS = reversed(REASONS) if os.geteuid() == 0 else REASONS
SKIPPED = "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip({!r})\n"
ALLOWED = SKIPPED.format(OWN)
NO_SSHD = SKIPPED.format("needs the command sshd, to make hosts of network namespaces")
OF_ANOTHER_MACHINE = SKIPPED.format(ANOTHERS)
NO_PACKAGE = "import pytest\npytest.importorskip('no_such_package')\ndef test_a(): pass\n"
FAILS_AS_EXPECTED = "import pytest\n@pytest.mark.xfail\ndef test_a(): assert False\n"


def run(folder: Path, texts: dict[str, str], ci: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A session with our conftest and these files of tests."""
    for name, text in texts.items():
        (folder / f"test_{name}.py").write_text(text)
    words = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", folder, *options]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    tests = Path(__file__).parent
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, (tests, tests.parent))), "CI": ci}
    return subprocess.run([*words, folder], cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


def test_skips_that_are_not_on_the_list_fail_in_ci_alone(tmp_path: Path) -> None:
    texts = {"sshd": NO_SSHD, "another": OF_ANOTHER_MACHINE, "package": NO_PACKAGE, "listed": ALLOWED}
    in_ci = run(tmp_path, texts, "true")
    assert in_ci.returncode == pytest.ExitCode.TESTS_FAILED, in_ci.stdout
    told = in_ci.stdout.split("skips that tests/allowed_skips.py does not allow on this machine")[1]
    for line in (
        "test_sshd.py::test_b: needs the command sshd",
        f"test_another.py::test_b: {ANOTHERS}",
        "test_package.py: could not import 'no_such_package'",
    ):
        assert f"\n{line}" in told
    assert "test_listed" not in told
    elsewhere = run(tmp_path, texts, "")
    assert elsewhere.returncode == pytest.ExitCode.OK, elsewhere.stdout
    assert "allowed_skips" not in elsewhere.stdout


def test_also_where_several_processes_run_the_tests(tmp_path: Path) -> None:
    done = run(tmp_path, {"sshd": NO_SSHD}, "true", "-n", "2")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert done.stdout.count("test_sshd.py::test_b: needs the command sshd") == 1


def test_what_is_expected_passes(tmp_path: Path) -> None:
    done = run(tmp_path, {"listed": ALLOWED, "fails": FAILS_AS_EXPECTED}, "true")
    assert done.returncode == pytest.ExitCode.OK, done.stdout
