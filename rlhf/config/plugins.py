"""Config options of other packages, from modules named in the entry-point group `rlhf.options`.

    [project.entry-points."rlhf.options"]       # in the pyproject.toml of the other package
    mine = "my_package.options"                 # importing this module registers its sections

Such a module registers sections with `rlhf.config.schema.option`. The YAML files that select the sections are
in a folder passed with `--config-dir`. This module imports no torch, and the modules of the group should not
import torch either, because `--help` imports all of them.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from rlhf.core.errors import UserError

GROUP = "rlhf.options"


@cache
def load() -> None:
    """Import all modules of the entry-point group, once.

    Raises:
        UserError: a module cannot be imported.
    """
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:  # the module may raise any exception; the message names its package
            package = point.dist.name if point.dist else point.name
            raise UserError(
                f"{point.value} must import (the package {package} names it in its entry points), got "
                f"{type(error).__name__}: {error}; fix or uninstall {package}"
            ) from None
