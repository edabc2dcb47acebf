"""Options of other packages: modules that installed packages name in the entry-point group `rlhf.options`.

    [project.entry-points."rlhf.options"]       # in the other package's pyproject.toml
    mine = "my_package.options"                 # importing it registers its sections (rlhf.schema.option)

The yaml files that choose them are in a folder that `--config-dir` names. Imports no torch, and neither
should such a module.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from rlhf.core.errors import UserError

GROUP = "rlhf.options"


@cache
def load() -> None:
    """Import them all, once.

    Raises:
        UserError: one of them does not import.
    """
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:  # whatever somebody else's module raises; the user is told whose it is
            package = point.dist.name if point.dist else point.name
            raise UserError(
                f"{point.value} must import (the package {package} names it in its entry points), got "
                f"{type(error).__name__}: {error}; mend or uninstall {package}"
            ) from error
