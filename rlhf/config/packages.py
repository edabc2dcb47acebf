"""Errors for packages that an option needs and that are not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator


def missing_package(
    option: str, module: str, extra: str, package: str = "", otherwise: str = ""
) -> Iterator[str]:
    """Yield an error if a module cannot be found.

    Args:
        option: the setting that needs the module, as it is typed.
        module: the module.
        extra: the extra of this project that installs it.
        package: the name of the package, if it is not that of the module.
        otherwise: a setting that does without, such as "set backend=torch".
    """
    if importlib.util.find_spec(module) is None:
        yield (
            f"{option} needs the package {package or module}, which is not installed; "
            f"run: pip install -e '.[{extra}]'{otherwise and f', or {otherwise}'}"
        )
