"""Tests of the package structure: import cycles, top-level modules, module length, and wheel contents."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "rlhf").rglob("*.py")
}


def imports(path: Path) -> set[str]:
    """Return the modules of the package that a file imports at its top, in functions, or for types only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & MODULES.keys() or {str(node.module)}
    return found & MODULES.keys()


def test_modules_have_no_import_cycle():
    """Count imports in functions and imports for types only; import-linter skips imports for types only."""
    graph = {name: imports(path) - {name} for name, path in MODULES.items() if path.name != "__init__.py"}
    while free := {name for name, used in graph.items() if not used & graph.keys()}:
        graph = {name: used for name, used in graph.items() if name not in free}
    assert not graph, f"these modules are part of an import cycle, or import one: {sorted(graph)}"


def test_package_has_few_top_level_modules_and_no_long_module():
    assert len(list((ROOT / "rlhf").glob("*.py"))) <= 17
    long = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert not {name: lines for name, lines in long.items() if lines > 800}


def test_every_folder_is_in_the_wheel():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert set(packages) == folders | {"rlhf.conf"}


def test_every_data_file_is_in_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for file in (ROOT / "rlhf").rglob("*.*"):
        if file.is_file() and file.suffix not in (".py", ".pyc"):
            package = ".".join(file.parent.relative_to(ROOT).parts)
            assert any(file.match(pattern) for pattern in listed.get(package, ())), file
