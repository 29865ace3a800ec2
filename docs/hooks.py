"""Hooks of mkdocs (mkdocs.yml): pages from elsewhere in the repository, and references made from the code.

The references of keys and commands are made at every build, so they cannot go stale.
"""

import json
import posixpath
import re
from collections.abc import Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from hvd_transformer.cli import main, train
from hvd_transformer.config.load import preset_names, preset_summary
from hvd_transformer.config.schema import KEYS, SECTIONS, Config, allowed, field, flatten, may_change

REPOSITORY = Path(__file__).parent.parent
# Page of the site → file of the repository.
ELSEWHERE = {
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "docker-images.md": "docker/README.md",
    "results.md": "benchmarks/RESULTS.md",
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
DARK_PICTURE = re.compile(r'(?<=srcset=")[^":]+(?=")')
TYPES = {int: "integer", float: "number", bool: "true or false", str: "text"}
LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/."""
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(REPOSITORY / source)))
    files.append(File.generated(config, "reference/configuration.md", content=configuration_page()))
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links are written for readers of the repository. Here those to pages lead to these, and those to other files of
    the repository become text. Also the pictures in `<source srcset>`, which mkdocs leaves as they are, lead there."""
    uri = page.file.src_uri
    origin = ELSEWHERE.get(uri, f"docs/{uri}")
    pages = {source: page for page, source in ELSEWHERE.items()}

    def relink(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        name = pages.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(name) is not None:
            return f"[{text}]({posixpath.relpath(name, posixpath.dirname(uri) or '.')}{anchor or ''})"
        return text if (REPOSITORY / path).exists() else match[0]  # mkdocs warns of what is not there

    def relocate(match: re.Match[str]) -> str:
        name = posixpath.join(posixpath.dirname(uri), match[0])
        if files.get_file_from_path(name) is None:
            raise PluginError(f"{origin}: srcset={match[0]}: no such file")
        return posixpath.relpath(name, page.url or ".")

    def rewrite(block: str) -> str:
        return block if block.startswith("```") else LINK.sub(relink, DARK_PICTURE.sub(relocate, block))

    blocks = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(map(rewrite, blocks))


def configuration_page() -> str:
    """Every key of the schema: a table per section."""
    lines = [
        "# Configuration reference: all keys",
        "",
        "Set a key with `KEY=VALUE` on the command line or in a `--config` file, section by section. The defaults are"
        " those without a preset. **Resume** says whether a run may resume with another value.",
    ]
    for section in ("", *SECTIONS):
        model = Config.model_fields[section].annotation if section else Config
        title = (model.__doc__ or section).splitlines()[0].rstrip(".")
        lines += ["", f"## {f'{section}: ' if section else ''}{title}", ""]
        lines += ["| key | type | default | meaning | resume |", "|---|---|---|---|---|"]
        lines += [_key_row(key) for key in KEYS if key.rpartition(".")[0] == section]
    lines += ["", "## Presets", "", "| preset | description |", "|---|---|"]
    lines += [_row(f"`{name}`", _text(preset_summary(name))) for name in preset_names()]
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """Every command with its arguments and options, as click has them."""
    blocks = ["# Command reference: hvd-train and hvd-transformer", _command("hvd-train", train.command)]
    group = main.group
    context = click.Context(group, info_name="hvd-transformer")
    blocks += [
        _command(f"hvd-transformer {name}", command)
        for name in group.list_commands(context)
        if (command := group.get_command(context, name)) is not None
    ]
    return "\n\n".join(blocks) + "\n"


def _command(name: str, command: click.Command, level: int = 2) -> str:
    """With the commands of a group below it. `level`: of its heading."""
    parent = click.Context(main.group, **main.group.context_settings)
    context = click.Context(command, parent, info_name=name)
    options = [option for option in command.get_params(context) if isinstance(option, click.Option)]
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    lines = [f"{'#' * level} {name}", "", f"```text\n{usage}\n```", "", cleandoc(command.help or ""), ""]
    lines += ["| option | value | meaning |", "|---|---|---|"]
    lines += [_option_row(option, context) for option in options]
    for inner in command.list_commands(context) if isinstance(command, click.Group) else ():
        if (found := command.get_command(context, inner)) is not None:
            lines += ["", _command(f"{name} {inner}", found, level + 1)]
    if name == "hvd-train":
        lines += ["", "KEY=VALUE and the presets are in the [configuration reference](configuration.md)."]
    return "\n".join(lines)


def _option_row(option: click.Option, context: click.Context) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    _, meaning = option.get_help_record(context) or ("", "")  # with default and range
    return _row(names, "" if option.is_flag else f"`{option.make_metavar(context)}`", _text(meaning))


def _key_row(key: str) -> str:
    found = field(key)
    # Of what `Annotated` wraps, pydantic has the metadata here.
    kind = allowed(key) or _with_limits(_type(found.annotation), found.metadata)
    default, resume = _word(flatten(Config())[key]), "may change" if may_change(key) else "must agree"
    return _row(f"`{key}`", kind, f"`{default}`", _text(found.description or ""), resume)


def _type(annotation: Any) -> str:
    """In words; the allowed values of a choice."""
    if annotation in (None, type(None)):
        return "none"
    if annotation in TYPES:
        return TYPES[annotation]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return _with_limits(_type(inner), metadata)
    return " or ".join(map(_type, get_args(annotation)))  # a union


def _with_limits(words: str, metadata: Sequence[Any]) -> str:
    parts = [part for entry in metadata for part in (entry, *getattr(entry, "metadata", ()))]
    limits = [
        f"{sign} {limit:g}" if (limit := getattr(part, name)) < 2**53 else f"{sign} 2^{limit.bit_length() - 1}"
        for part in parts
        for name, sign in LIMITS.items()
        if hasattr(part, name)
    ]
    return " ".join([words, ", ".join(limits)]).strip()


def _text(words: str) -> str:
    """For Markdown, which would take <unk> for a tag."""
    return words.replace("<", "&lt;").replace("*", "\\*")


def _word(value: Any) -> str:
    """As on the command line."""
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
