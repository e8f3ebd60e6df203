"""What the source says of itself, for tests of the layers and the style."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "swarm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One source file."""

    name: str
    path: Path
    text: str
    tree: ast.Module
    imports: frozenset[str]
    """Every module, and every name of a module, that is imported anywhere in it, function bodies included."""

    def uses(self, *prefixes: str) -> list[str]:
        """Imports of one of `prefixes` or of something below it."""
        return sorted(i for i in self.imports if any(i == p or i.startswith(p + ".") for p in prefixes))


@cache
def modules() -> dict[str, Module]:
    """The modules of swarm by dotted name."""
    return {module.name: module for module in map(_read, sorted(ROOT.rglob("*.py")))}


def _read(path: Path) -> Module:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    text = path.read_text()
    tree = ast.parse(text)
    return Module(name=name, path=path, text=text, tree=tree, imports=frozenset(_imports(tree, name, path)))


def _imports(tree: ast.Module, name: str, path: Path) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
