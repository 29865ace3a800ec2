"""The modules of a user's folder, and which of them import which, found without running any of them.

The standard library's modulefinder would do, but for packages without an `__init__.py`.
"""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

_OURS = __package__.partition(".")[0]  # the folder may be a checkout of this project


class UserModules:
    """The modules below a folder, and which of them import which."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[tuple[str, ...], ast.Module | None] = {}  # of the modules that have been followed
        self.mistakes: dict[tuple[str, ...], str] = {}  # in modules that are not valid Python

    def has_code(self, parts: tuple[str, ...]) -> bool:
        """Whether it is a module or a package with an `__init__.py`, which Python prefers to what is installed."""
        path = self.locate(parts)
        return path is not None and (path.is_file() or (path / "__init__.py").is_file())

    def locate(self, parts: tuple[str, ...]) -> Path | None:
        """The file of a module, or the folder of a package, which need not have an `__init__.py`."""
        if parts[0] == _OURS or not all(part.isidentifier() for part in parts):
            return None
        base = self._folder.joinpath(*parts)
        if (base / "__init__.py").is_file():
            return base
        if (file := base.with_name(f"{parts[-1]}.py")).is_file():
            return file
        return base if base.is_dir() else None

    def follow(self, parts: tuple[str, ...]) -> None:
        """Take in a module, the packages that it is in and all that they import."""
        waiting = [parts]
        while waiting:
            parts = waiting.pop()
            for end in range(1, len(parts) + 1):
                name = parts[:end]
                if name in self._trees or (path := self.locate(name)) is None:
                    continue
                package = path.is_dir()
                file = path / "__init__.py" if package else path
                self._trees[name] = tree = self._parse(name, file) if file.is_file() else None
                if tree is not None:
                    waiting += _imports(tree, name if package else name[:-1])

    def _parse(self, name: tuple[str, ...], file: Path) -> ast.Module | None:
        try:
            return ast.parse(file.read_bytes(), file.name)
        except (SyntaxError, ValueError, OSError, RecursionError) as error:  # ValueError: a NUL in the file
            self.mistakes[name] = str(error)
            return None

    def may_define(self, parts: tuple[str, ...], name: str) -> bool:
        """Whether a module may have the name: what it makes up while it runs is not known."""
        tree = self._trees.get(parts)
        if tree is None:
            return False
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in (name, "__getattr__"):
                return True
            if isinstance(node, ast.Name) and node.id in (name, "globals"):
                return True
            if isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"):
                return True
        return False

    def files(self) -> Iterator[Path]:
        """The files of the modules that have been taken in; of a package all."""
        for name in self._trees:
            path = self.locate(name)
            assert path is not None
            if path.is_file():
                yield path
            elif (path / "__init__.py").is_file():
                yield from regular_files(path)


def regular_files(folder: Path) -> Iterator[Path]:
    """The files below a folder, in order, without those that Python or an editor makes."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        for name in sorted(names):
            path = Path(parent) / name
            if not name.startswith(".") and path.suffix != ".pyc" and path.is_file():
                yield path


def _imports(tree: ast.Module, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The names of all modules that a module in `package` may import; those of `from x import y` twice, x and x.y."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((*base, *alias.name.split(".")) for alias in node.names)
