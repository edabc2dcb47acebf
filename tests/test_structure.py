"""The structure of the package: no import circles, few modules at the top, no long modules."""

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
    """Return the modules of the package that a file imports: at its top, in functions, or for types only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & MODULES.keys() or {str(node.module)}
    return found & MODULES.keys()


def test_no_module_imports_itself_through_others():
    """import-linter skips imports for types only; here they count, and so do imports in functions."""
    graph = {name: imports(path) - {name} for name, path in MODULES.items() if path.name != "__init__.py"}
    while free := {name for name, used in graph.items() if not used & graph.keys()}:
        graph = {name: used for name, used in graph.items() if name not in free}
    assert not graph, f"these modules import one another in circles: {sorted(graph)}"


def test_modules_are_few_at_the_top_and_short():
    assert len(list((ROOT / "rlhf").glob("*.py"))) <= 12
    long = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert not {name: lines for name, lines in long.items() if lines > 450}


def test_every_folder_is_in_the_wheel():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert set(packages) == folders | {"rlhf.conf"}
