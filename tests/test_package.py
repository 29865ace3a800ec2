"""What setup.cfg says of the package: its licence, and what it needs."""

import ast
import re
import sys
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, metadata, packages_distributions

import pytest
from conftest import REPOSITORY
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

CONFIG = ConfigParser()
CONFIG.read(REPOSITORY / "setup.cfg", encoding="utf-8")
# Not on the package index in a form that builds: docker/build_horovod.sh makes it.
OWN_BUILD = {"horovod"}


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
    options = ["install_requires", "distributed", "service", "pretrained"]
    declared = {re.split(r"[^\w.-]", line)[0].lower() for option in options for line in requirements(option)}
    distributions = packages_distributions()
    needed = {name: {one.lower() for one in distributions[name]} for name in imported() - OWN_BUILD}
    assert {"torch", "requests", "yaml"} <= needed.keys()
    assert not [name for name, of in needed.items() if not of & declared]


@pytest.mark.parametrize("option", ["install_requires", *CONFIG["options.extras_require"]])
def test_every_requirement_has_a_lower_bound(option: str) -> None:
    assert requirements(option)
    assert not [line for line in requirements(option) if not re.search(r">=|==", line)]


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
