"""Rule for the libraries of a run: a file of the user must not hide one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhf.checks.rules import rule
from rlhf.config.function_source import top_level_module
from rlhf.config.root import Config

# Imported by each run, directly or by transformers, with names that a file of the user may have.
LIBRARIES = (
    "accelerate",
    "datasets",
    "deepspeed",
    "mlflow",
    "peft",
    "tokenizers",
    "torch",
    "trackio",
    "transformers",
    "vllm",
    "wandb",
)


@rule
def libraries_are_not_hidden(cfg: Config) -> Iterator[str]:
    """Yield an error for each library that Python would import from a file in the current folder."""
    for name in LIBRARIES:
        for file in (Path(f"{name}.py"), Path(name, "__init__.py")):
            if file.is_file() and imports(name, file):
                yield (
                    f"{file} must not have the name of a library (Python imports it instead of {name}), got "
                    f"{file.absolute()}; rename it"
                )


def imports(name: str, file: Path) -> bool:
    """Return whether `import <name>` would read `file`."""
    found = top_level_module(name)
    return found is not None and found.origin is not None and file.samefile(found.origin)
