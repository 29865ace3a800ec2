"""The built-in corpus: the English documentation that comes with every Python, in a fixed order.

It consists of the language reference in `pydoc_data.topics` and the docstrings of the standard library, which are found
by parsing its sources; none of them is imported or run.
"""

import ast
import inspect
import platform
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

# Tests, an editor, demos, installers and old copies: little English, or text of other projects.
SKIPPED = {"__pycache__", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
SKIPPED |= {"_vendor", "turtledemo"}
SHARES = {"train": 0.9, "valid": 0.05, "test": 0.05}


def version() -> str:
    """What the corpus depends on: the same version of Python gives the same text."""
    return f"{platform.python_implementation().lower()}-{platform.python_version()}"


def write_splits(folder: Path) -> None:
    """Write train.txt, valid.txt and test.txt.

    Each document (a topic, or the docstrings of a module) goes as a whole to the split that is farthest below its
    share.
    """
    sizes = dict.fromkeys(SHARES, 0)
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.txt").open("wb")) for name in SHARES}
        for document in documents():
            data = f"{document}\n\n".encode("utf-8", "replace")
            split = min(SHARES, key=lambda name: sizes[name] / SHARES[name])
            sizes[split] += len(data)
            files[split].write(data)


def documents() -> Iterator[str]:
    """The documents in order, without docstrings that occurred before."""
    library = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    for source in [library / "pydoc_data" / "topics.py", *_sources(library)]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about invalid escapes in the library
                tree = ast.parse(source.read_bytes())
        except (OSError, SyntaxError, ValueError):  # missing or no Python: some systems strip their library
            continue
        if source.parent.name == "pydoc_data":
            yield from _topics(tree)
            continue
        docstrings = list(dict.fromkeys(text for text in _docstrings(tree) if text not in seen))
        seen.update(docstrings)
        if docstrings:
            yield "\n\n".join(docstrings)


def _sources(library: Path) -> list[Path]:
    sources: list[Path] = []
    for name in sorted(sys.stdlib_module_names - SKIPPED):
        module, package = library / f"{name}.py", library / name
        if package.is_dir():
            found = sorted(package.rglob("*.py"))
            sources += [path for path in found if not SKIPPED & set(path.relative_to(library).parts)]
        elif module.is_file():
            sources.append(module)
    return sources


def _topics(tree: ast.Module) -> Iterator[str]:
    """The texts of `topics = {name: text, …}`, sorted by name."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            topics = ast.literal_eval(statement.value)
            yield from (inspect.cleandoc(topics[name]) for name in sorted(topics))


def _docstrings(node: ast.AST) -> Iterator[str]:
    """The docstrings in the order of the source."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _docstrings(child)
