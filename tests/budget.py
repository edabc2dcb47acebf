"""Hold the folders of the package to their budgets of code lines, as a part of `make check`.

    python -m tests.budget            the folders whose budget is wrong, and the sum
    python -m tests.budget --show     all folders

A code line has a token that is neither a comment nor part of a docstring. The budgets stand in
pyproject.toml, as `[tool.budget]`; "commands" is for the modules beside the folders. A change that needs more
lines raises its budget in the same commit and says why; a change that needs fewer lowers it.

Exit code: 1 if a folder has no budget, more lines than its budget, or at least 30 lines fewer.
"""

from __future__ import annotations

import ast
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SLACK = 30  # lines below its budget that a folder may have
IGNORED = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(path: Path) -> int:
    """Return the number of code lines of a file."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                docstrings |= {*range(each.lineno, (each.end_lineno or each.lineno) + 1)}
    lines: set[int] = set()
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in IGNORED:
                lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines - docstrings)


def main() -> int:
    """Print the lines of each folder beside its budget, and return the exit code."""
    budgets: dict[str, int] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["budget"]
    counts: Counter[str] = Counter()
    for path in (ROOT / "rlhf").rglob("*.py"):
        parts = path.relative_to(ROOT / "rlhf").parts
        counts[parts[0] if len(parts) > 1 else "commands"] += code_lines(path)
    wrong = 0
    for name in sorted(budgets.keys() | counts.keys()):
        lines, budget = counts[name], budgets.get(name, 0)
        fits = budget - SLACK < lines <= budget
        wrong += not fits
        if not fits or "--show" in sys.argv:
            remedy = "" if fits else ": change tool.budget"
            print(f"rlhf/{name}: {lines:,} code lines, budget {budget:,}{remedy}")
    print(f"rlhf: {sum(counts.values()):,} code lines, budget {sum(budgets.values()):,}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
