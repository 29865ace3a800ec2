"""What README.md, ARCHITECTURE.md and docs/ name is there: commands, options, keys, links, messages, packages.

test_readme.py runs the commands of the README and the guide to their end; those of the other pages are only checked.
"""

import re
import shlex
import subprocess
import sys
from configparser import ConfigParser
from html import unescape
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from conftest import REPOSITORY
from pages import BESIDE, CHECKED, NAVIGATION, TEXT, commands, links

from hvd_transformer.cli.main import COMMANDS
from hvd_transformer.cli.train import command as train
from hvd_transformer.config import load
from hvd_transformer.config.schema import KEYS, SECTIONS

LINES = [(page, line) for page in (*CHECKED, *BESIDE) for line in commands(page)]
LAUNCHERS = {"horovodrun", "mpirun"}
OTHERS = {"sbatch", "kubectl", "docker", "cp", "cat", "paste", "cut"}
# Of other programs, named in running text.
OTHER_OPTIONS = {
    "--nnodes", "--nproc-per-node", "--master-addr", "--master-port", "--rdzv-endpoint", "--max-restarts",
    "--gpus-per-node", "--gpus-per-task",
    "--cpus-per-task", "--batch", "--signal", "--list-gpus", "--shm-size", "--from-env-file", "--partition", "--time",
    "--published", "--rounds", "--steps", "--warmup", "--strict", "--model",
    "--append-eod", "--data-path", "--json-keys", "--tokenizer-model", "--train-data-path", "--valid-data-path",
    "--workers", "--peer-python", "--logdir", "--tests",
}  # fmt: skip


def ours(name: str) -> click.Command:
    """The command behind `hvd-transformer NAME`."""
    assert name in COMMANDS, f"hvd-transformer has no command {name}"
    found = getattr(import_module(f"hvd_transformer.cli.{name}"), name)
    assert isinstance(found, click.Command)
    return found


def with_inner(command: click.Command) -> list[click.Command]:
    """A command and those of a group."""
    return [command, *(command.commands.values() if isinstance(command, click.Group) else ())]


def check_settings(words: list[str]) -> None:
    """As hvd-train takes them."""
    given = train.make_context("hvd-train", list(words)).params
    load(given["preset"], given["file"], given["settings"])


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{page}: {line[:50]}" for page, line in LINES])
def test_every_command_is_one(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    program, *words = shlex.split(line.partition(" > ")[0])
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
    keys = {key for span in spans for key in re.findall(rf"(?<![.\w/])(?:{'|'.join(SECTIONS)})\.[a-z_]+", span)}
    assert keys - {"model.safetensors", "model.gguf", "optimizer.safetensors"} <= set(KEYS)
    options = {option for span in spans for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", span)}
    commands = [train, *(command for name in COMMANDS for command in with_inner(ours(name)))]
    parameters = [parameter for command in commands for parameter in command.params]
    known = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
    assert options <= known | {"--help"} | OTHER_OPTIONS


@pytest.mark.parametrize("page", TEXT)
def test_every_file_module_and_target_in_the_text_is_there(page: str) -> None:
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT[page], flags=re.DOTALL))
    folders = ("hvd_transformer", "benchmarks", "tests", "docs", "docker", "hostfiles", r"\.ci")
    for path in (path for span in spans for path in re.findall(rf"(?<![\w/.-])(?:{'|'.join(folders)})/[\w./-]*", span)):
        assert (REPOSITORY / path).exists(), path
    for name in (name for span in spans for name in re.findall(r"python -m (benchmarks\.\w+)", span)):
        path = REPOSITORY / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for span in spans:
        for target in re.findall(r"(?:^|\w=\w+ )make ([a-z-]+)", span):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("page", TEXT)
def test_every_link_leads_somewhere(page: str) -> None:
    for target, anchor in links(page):
        assert target.exists(), target
        if anchor:
            assert anchor in anchors(target), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_the_readme_links_every_page() -> None:
    linked = {target.resolve() for target, _ in links("README.md")}
    assert [page for page in TEXT if page not in ("README.md", *BESIDE) and REPOSITORY / page not in linked] == []


def test_every_message_in_troubleshooting_is_still_said() -> None:
    """What stands between the dots is in the source, wherever that breaks its strings."""
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(REPOSITORY / "hvd_transformer").rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)
    title = "## Messages of hvd-train and hvd-transformer"
    ours_say = TEXT["docs/troubleshooting.md"].partition(title)[2].partition("\n## ")[0]
    messages = re.findall(r"`([^`\n]+)`", "\n".join(re.findall(r"^### .*", ours_say, re.MULTILINE)))
    assert len(messages) > 10
    pieces = [piece.strip() for message in messages for piece in message.split("…") if len(piece.strip()) > 5]
    assert [piece for piece in pieces if piece not in sources] == []


def test_the_presets_of_the_guide_are_the_presets() -> None:
    table = TEXT["docs/guide/getting-started.md"].split("| preset | description |")[1].split("\n\n")[0]
    presets = {path.stem for path in (REPOSITORY / "hvd_transformer" / "config" / "presets").iterdir()}
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == presets


def test_the_architecture_has_every_package_in_the_order_of_the_contract() -> None:
    setup = ConfigParser()
    setup.read(REPOSITORY / "setup.cfg", encoding="utf-8")
    layers = setup["importlinter:contract:rooms"]["layers"].split("\n")[1:]
    table = TEXT["ARCHITECTURE.md"].split("## Packages")[1].split("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    ordered = [(int(layer), name.strip(" `")) for _, name, layer, *_ in rows]
    assert [layer for layer, _ in ordered] == sorted(layer for layer, _ in ordered)
    wanted = [(number, name) for number, own in enumerate(reversed(layers), 1) for name in re.findall(r"\w+", own)]
    assert sorted(ordered) == sorted(wanted)
    here = {path.stem for path in (REPOSITORY / "hvd_transformer").iterdir()} - {"__init__", "__pycache__", "py"}
    assert {name for _, name in ordered} == here


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as by `make docs`."""
    pytest.importorskip("mkdocs", reason="needs mkdocs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def html(site: Path, page: str) -> str:
    folder = page.removesuffix(".md").removesuffix("index")
    return (site / folder / "index.html").read_text(encoding="utf-8")


def codes(site: Path, page: str) -> list[str]:
    """What is set as code on a page."""
    return list(map(unescape, re.findall(r"<code>(.*?)</code>", html(site, page), re.DOTALL)))


def test_the_site_has_every_page(site: Path) -> None:
    assert {page for page in TEXT if page.startswith("docs/")} <= {f"docs/{page}" for page in NAVIGATION}
    for page in NAVIGATION:
        assert "<h1" in html(site, page)


def test_every_key_is_in_the_site_s_reference(site: Path) -> None:
    found = codes(site, "reference/configuration.md")
    assert [key for key in KEYS if found.count(key) != 1] == []


def test_every_command_and_option_is_in_the_site_s_reference(site: Path) -> None:
    sections = re.split(r"<h2 id=", html(site, "reference/commands.md"))[1:]
    by_name = {"hvd-train": train} | {f"hvd-transformer {name}": ours(name) for name in COMMANDS}
    for (name, command), section in zip(by_name.items(), sections, strict=True):
        assert f">{name}<" in section
        found = set(map(unescape, re.findall(r"<code>(.*?)</code>", section)))
        options = (parameter for parameter in command.params if isinstance(parameter, click.Option))
        assert {name for option in options for name in (*option.opts, *option.secondary_opts)} <= found


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    """Diagrams apart, whose script mkdocs-material loads in the browser."""
    text = html(site, "architecture.md")
    assert re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', text) == []
    assert text.count('class="mermaid"') == 2
