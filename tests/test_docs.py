"""Every command, option, key, link and message in docs/ is one that there is. None is run to its end: README's are."""

import re
import shlex
import subprocess
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from conftest import REPOSITORY

from hvd_transformer.cli.main import COMMANDS
from hvd_transformer.cli.train import command as train
from hvd_transformer.config import load
from hvd_transformer.config.schema import KEYS, SECTIONS

PAGES = sorted((REPOSITORY / "docs").glob("*.md"))
TEXT = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
LINES = [
    (page, line)
    for page, text in TEXT.items()
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    for line in block.splitlines()
]
LAUNCHERS = {"horovodrun", "mpirun"}
OTHERS = {"sbatch", "kubectl", "docker"}
# Of other programs, named in running text.
OTHER_OPTIONS = {
    "--nnodes", "--nproc-per-node", "--master-addr", "--master-port", "--rdzv-endpoint", "--max-restarts",
    "--cpus-per-task", "--requeue", "--list-gpus", "--shm-size", "--from-env-file", "--partition", "--time",
}  # fmt: skip


def ours(name: str) -> click.Command:
    """The command behind `hvd-transformer NAME`."""
    assert name in COMMANDS, f"hvd-transformer has no command {name}"
    found = getattr(import_module(f"hvd_transformer.cli.{name}"), name)
    assert isinstance(found, click.Command)
    return found


def check_settings(words: list[str]) -> None:
    """As hvd-train takes them."""
    given = train.make_context("hvd-train", list(words)).params
    load(given["preset"], given["file"], given["settings"])


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{page}: {line[:50]}" for page, line in LINES])
def test_every_command_is_one(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    program, *words = shlex.split(line)
    if program in LAUNCHERS:
        words = words[words.index("hvd-train") :]
        program, *words = words
    if program == "hvd-train":
        check_settings(words)
    elif program == "hvd-transformer":
        name, *words = words
        params = ours(name).make_context(name, list(words)).params
        if "--" in words:
            check_settings(words[words.index("--") + 1 :])
        if name == "launch" and params["host_discovery_script"] is None:
            environment = {"HF_TOKEN": "hush", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
            done = CliRunner(env=environment).invoke(ours(name), ["--dry-run", *words], catch_exceptions=False)
            assert done.exit_code == 0
            assert done.output
    elif program == "make":
        subprocess.run(["make", "--dry-run", *words], cwd=REPOSITORY, capture_output=True, check=True)
    else:
        assert program in OTHERS


@pytest.mark.parametrize("page", TEXT)
def test_every_key_and_option_in_the_text_is_one(page: str) -> None:
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT[page], flags=re.DOTALL))
    keys = {key for span in spans for key in re.findall(rf"(?<!\.)\b(?:{'|'.join(SECTIONS)})\.[a-z_]+", span)}
    assert keys <= set(KEYS)
    options = {option for span in spans for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", span)}
    parameters = [*train.params, *(parameter for name in COMMANDS for parameter in ours(name).params)]
    known = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
    assert options <= known | {"--help"} | OTHER_OPTIONS


@pytest.mark.parametrize("page", TEXT)
def test_every_link_leads_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", TEXT[page]):
        assert (REPOSITORY / "docs" / target).exists(), target


def test_the_readme_links_every_page() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert [page for page in TEXT if f"(docs/{page})" not in readme] == []


def test_every_message_in_troubleshooting_is_still_said() -> None:
    """What stands between the dots is in the source, wherever that breaks its strings."""
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(REPOSITORY / "hvd_transformer").rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)
    ours_say = TEXT["troubleshooting.md"].partition("## What our commands say")[2].partition("\n## ")[0]
    messages = re.findall(r"`([^`\n]+)`", "\n".join(re.findall(r"^### .*", ours_say, re.MULTILINE)))
    assert len(messages) > 10
    pieces = [piece.strip() for message in messages for piece in message.split("…") if len(piece.strip()) > 5]
    assert [piece for piece in pieces if piece not in sources] == []
