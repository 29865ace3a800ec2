"""A Docker engine for the tests, and base images for it where no registry can be reached.

As root and without a running engine, one is started on a socket of its own. It keeps its images in the cache folder,
so only the first run compiles Horovod.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import REPOSITORY

IMAGE = "hvd-transformer:test"
DOCKERFILE = "docker/Dockerfile.cpu"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hvd-transformer" / "docker"
_PUBLIC_BASE = "debian:bookworm-slim"
_OWN_BASE = "hvd-transformer-base:bookworm"
_BUILD_BASE = "hvd-transformer-build-base:bookworm"
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")


class Engine:
    """What the tests ask of an engine."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment

    def run(self, *words: str | Path, check: bool = True, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """A command with this engine as Docker's."""
        done = subprocess.run(
            list(map(str, words)), env=self.environment, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0 or not check, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done

    def has(self, *words: str) -> bool:
        """Whether a command can be run and succeeds."""
        return shutil.which(words[0]) is not None and self.run(*words, check=False).returncode == 0

    def compose(self) -> list[str]:
        """Docker Compose's command: the plugin, or its first version."""
        for words in (["docker", "compose"], ["docker-compose"]):
            if self.has(*words, "version"):
                return words
        pytest.skip("needs Docker Compose")

    def build(self, work: Path) -> None:
        """The image from our Dockerfile.cpu."""
        words = ["docker", "build", "--network", "host", "-t", IMAGE, "-f", REPOSITORY / DOCKERFILE]
        words += [word for name in _PROXIES if name in os.environ for word in ("--build-arg", name)]
        if not self.has("docker", "image", "inspect", _PUBLIC_BASE) and not self.has("docker", "pull", _PUBLIC_BASE):
            self._make_bases(work)
            words += ["--build-arg", f"BASE={_OWN_BASE}", "--build-arg", f"BUILD_BASE={_BUILD_BASE}"]
        self.run(*words, REPOSITORY, timeout=3000)

    def _make_bases(self, work: Path) -> None:
        """Debian from its archive; and for what is compiled, the same with the Python packages that pip finds here."""
        if sys.version_info[:2] != (3, 11):
            pytest.skip(f"no registry with {_PUBLIC_BASE}, and to fetch its packages the tests need Python 3.11")
        if not self.has("docker", "image", "inspect", _OWN_BASE):
            if os.getuid() != 0 or not shutil.which("debootstrap"):
                pytest.skip(f"no registry with {_PUBLIC_BASE}, and no debootstrap (as root) to make a base image")
            root, archive = work / "debian", work / "debian.tar"
            self.run("debootstrap", "--variant=minbase", "bookworm", root, timeout=600)
            for package in (root / "var/cache/apt/archives").glob("*.deb"):
                package.unlink()
            self.run("tar", "-C", root, "-cf", archive, ".")
            shutil.rmtree(root)
            self.run("docker", "import", archive, _OWN_BASE)
            archive.unlink()
        context = work / "packages"
        for name in ("LICENSE", "setup.cfg", "pyproject.toml", "constraints.txt"):
            shutil.copy(REPOSITORY / name, work)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", context / "wheels"]
        constraints = ["-c", work / "constraints.txt"]
        self.run(*pip, *constraints, f"{work}[{','.join(image_extras())}]", "setuptools>=77", timeout=900)
        self.run(*pip, "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "horovod==0.28.1", timeout=300)
        (context / "Dockerfile").write_text(
            f"FROM {_OWN_BASE}\nCOPY wheels /wheels\nENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels\n", encoding="utf-8"
        )
        self.run("docker", "build", "-t", _BUILD_BASE, context, timeout=300)


def image_extras() -> list[str]:
    """The extras of setup.cfg that the Dockerfile installs."""
    groups = re.findall(r"pip install .*['\"]\.\[([\w,]+)", (REPOSITORY / DOCKERFILE).read_text(encoding="utf-8"))
    return sorted({extra for group in groups for extra in group.split(",")})


@contextmanager
def engine() -> Iterator[Engine]:
    """The engine that docker finds, or one of our own until the end."""
    found = _client()
    if found.has("docker", "info", "--format", "{{.ServerVersion}}"):
        yield found
    elif os.getuid() == 0 and shutil.which("dockerd"):
        with tempfile.TemporaryDirectory(prefix="hvd-docker-") as folder:
            yield from _start(found, Path(folder))
    else:
        pytest.skip("needs a running Docker engine, or dockerd as root to start one")


def _client() -> Engine:
    """The first docker on the path that builds with BuildKit: some lack its plugin."""
    for folder in os.get_exec_path():
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        found = Engine({**os.environ, "PATH": path, "DOCKER_BUILDKIT": "1"})
        if (Path(folder) / "docker").exists() and found.has("docker", "build", "--help"):
            return found
    pytest.skip("needs Docker with BuildKit")


def _start(client: Engine, folder: Path) -> Iterator[Engine]:
    _CACHE.mkdir(parents=True, exist_ok=True)
    started = Engine({**client.environment, "DOCKER_HOST": f"unix://{folder}/socket"})
    words = ["dockerd", "--data-root", _CACHE, "--exec-root", folder / "exec", "--pidfile", folder / "pid"]
    words += ["-H", started.environment["DOCKER_HOST"]]
    # The machine's own packet filter and bridges are left alone.
    words += ["--iptables=false", "--ip6tables=false", "--bridge=none"]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(list(map(str, words)), stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while not started.has("docker", "info", "--format", "{{.ServerVersion}}"):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.skip(f"dockerd does not start here: {log.read_text(encoding='utf-8').splitlines()[-1:]}")
            time.sleep(0.5)
        yield started
    finally:
        process.terminate()
        process.wait(60)
        started.run("umount", folder / "exec/netns/default", check=False)  # dockerd leaves it
