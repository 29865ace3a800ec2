"""The pages of the documentation: README.md, ARCHITECTURE.md, docs/ and three more, and the commands in them."""

import re
from pathlib import Path

import yaml
from conftest import REPOSITORY


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose Python names mean nothing here."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)


def _navigation(entry: object) -> list[str]:
    """The pages below an entry of mkdocs' `nav`, in order."""
    if isinstance(entry, str):
        return [entry]
    entries = entry.values() if isinstance(entry, dict) else entry
    return [page for inner in entries for page in _navigation(inner)]


NAVIGATION = _navigation(yaml.load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)["nav"])
# Their commands are run, in this order; those of the other pages need clusters, and are checked.
RUN = ["README.md", *(f"docs/{page}" for page in NAVIGATION if page.startswith("guide/"))]
DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
CHECKED = ["ARCHITECTURE.md", *(f"docs/{page.name}" for page in DOCS)]
# A site that hosts the repository links them by itself; they are no part of ours.
BESIDE = ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
TEXT = {page: (REPOSITORY / page).read_text(encoding="utf-8") for page in (*RUN, *CHECKED, *BESIDE)}


def commands(page: str) -> list[str]:
    """The lines of its `console` blocks, without their comments."""
    blocks = re.findall(r"```console\n(.*?)```", TEXT[page], re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]


def links(page: str) -> list[tuple[Path, str]]:
    """The file of each link to one, and the anchor or an empty string."""
    found = re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", re.sub(r"```.*?```", "", TEXT[page], flags=re.DOTALL))
    folder = (REPOSITORY / page).parent
    return [(folder / target if target else REPOSITORY / page, anchor) for target, anchor in found]
