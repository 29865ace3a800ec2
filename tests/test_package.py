"""What setup.cfg says of the package: its licence, what it needs, and what is in its sdist and wheel."""

import ast
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, metadata, packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from conftest import REPOSITORY
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

CONFIG = ConfigParser()
CONFIG.read(REPOSITORY / "setup.cfg", encoding="utf-8")
# Not on the package index in a form that builds: docker/build_horovod.sh makes it.
OWN_BUILD = {"horovod"}
# Not in dev: it brings uvloop, on which the service that is tested would then run.
ELSEWHERE = {"trackio": ["trackio"]}
BUILD = "from setuptools.build_meta import {0}; print({0}('..'))"


def requirements(option: str) -> list[str]:
    section = "options" if option == "install_requires" else "options.extras_require"
    lines = (line.partition(";")[0].strip() for line in CONFIG[section][option].splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def imported() -> set[str]:
    """The top-level modules of others that our code imports, anywhere."""
    found = set()
    for path in (REPOSITORY / "hvd_transformer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"hvd_transformer"}


def test_every_import_is_declared() -> None:
    extras = [name for name in CONFIG["options.extras_require"] if name not in ("build", "dev")]
    declared = {
        re.split(r"[^\w.-]", line)[0].lower()
        for option in ("install_requires", *extras)
        for line in requirements(option)
    }
    distributions = {**ELSEWHERE, **packages_distributions()}
    needed = {name: {one.lower() for one in distributions[name]} for name in imported() - OWN_BUILD}
    assert {"torch", "requests", "yaml"} <= needed.keys()
    assert not [name for name, of in needed.items() if not of & declared]


@pytest.mark.parametrize("option", ["install_requires", *CONFIG["options.extras_require"]])
def test_every_requirement_has_a_lower_bound(option: str) -> None:
    assert requirements(option)
    assert not [line for line in requirements(option) if not re.search(r">=|==", line)]


def test_the_torch_that_make_installs_is_in_the_range_that_works() -> None:
    """Releases of the range have been tested; constraints.txt names the newest of them, with all that make installs."""
    (required,) = (Requirement(line) for line in requirements("install_requires") if re.match(r"torch\b(?!text)", line))
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (pinned,) = (line.removeprefix("torch==") for line in lines if line.startswith("torch=="))
    assert pinned in required.specifier
    assert {bound.operator for bound in required.specifier} == {">=", "<"}
    minor = int(pinned.split(".")[1])
    assert f"2.{minor + 1}.0" not in required.specifier
    oldest = next(bound.version for bound in required.specifier if bound.operator == ">=")
    page = (REPOSITORY / "docs" / "guide" / "when-to-use.md").read_text(encoding="utf-8")
    assert f"{oldest} to 2.{minor}. `make install` installs {pinned}." in page


def test_the_licence_is_the_one_that_setup_cfg_names() -> None:
    assert CONFIG["metadata"]["license"] == "Apache-2.0"
    assert CONFIG["metadata"]["license_files"] == "LICENSE"
    text = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert text.count("\n") == 202  # the whole of it


def test_every_exact_version_installs_on_every_python_that_is_promised() -> None:
    """A line of constraints.txt counts from 3.10.0 on, or from 3.11.0 on where its marker says so.

    pip installs no package on an older Python than it requires, and distributions keep the first release of a series.
    """
    refused = []
    for line in (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pinned = Requirement(line)
        if pinned.marker is not None and not pinned.marker.evaluate():
            continue  # for another Python than this one
        try:
            wanted = metadata(pinned.name)["Requires-Python"]
        except PackageNotFoundError:  # for another platform
            continue
        oldest = "3.11.0" if '>= "3.11"' in line else "3.10.0"
        if wanted and not SpecifierSet(wanted).contains(oldest):
            refused.append(f"{line}: requires Python {wanted}")
    assert refused == []


def build(what: str, folder: Path) -> Path:
    """Calls setuptools as `python -m build` does, in the sources in `folder`; the result is beside them."""
    command = [sys.executable, "-c", BUILD.format(what)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=120)
    return folder.parent / done.stdout.splitlines()[-1]


def files(folder: Path) -> set[str]:
    """Everything below, as paths relative to the folder's parent."""
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder.parent)) for path in found}


def test_the_wheel_from_the_sdist_has_every_file_of_the_package(tmp_path: Path) -> None:
    """Native code, presets, pages and py.typed too; the sdist also has what builds Horovod, and no tests."""
    checkout = tmp_path / "checkout"
    for name in ("hvd_transformer", "docker", "tests"):
        shutil.copytree(REPOSITORY / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in REPOSITORY.iterdir():
        if path.is_file():
            shutil.copy(path, checkout)
    sdist = build("build_sdist", checkout)
    shutil.unpack_archive(sdist, tmp_path)
    sources = tmp_path / sdist.name.removesuffix(".tar.gz")
    beside = {path.split("/", 1)[1] for path in files(sources) if "egg-info" not in path}
    expected = {"constraints.txt", "CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "docker/build_horovod.sh"}
    expected |= {"MANIFEST.in", "PKG-INFO", "pyproject.toml", "setup.cfg"}
    expected |= {f"docker/{name}" for name in files(REPOSITORY / "docker" / "patches")}
    assert beside == expected | files(REPOSITORY / "hvd_transformer")
    with ZipFile(build("build_wheel", sources)) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == files(REPOSITORY / "hvd_transformer")


def test_the_changelog_has_the_sections_of_keep_a_changelog() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert re.match(rf"\[{re.escape(CONFIG['metadata']['version'])}\] - \d{{4}}-\d\d-\d\d$", versions[1])
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # what CFF 1.2.0 requires
    stated = {key: citation[key] for key in ("title", "version", "license")}
    assert stated == {key: CONFIG["metadata"][of] for key, of in
                      (("title", "name"), ("version", "version"), ("license", "license"))}  # fmt: skip


def test_the_tested_pythons_are_among_those_that_are_promised() -> None:
    stated = re.findall(r"Python :: (3\.\d+)", CONFIG["metadata"]["classifiers"])
    assert stated
    promised = SpecifierSet(CONFIG["options"]["python_requires"])
    assert [version for version in stated if version not in promised] == []
