"""Loading of the user's hooks."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from rlhf.config.class_address import load_class
from rlhf.core.errors import UserError
from rlhf.loggers.hooks import METHODS, Hook


def load_hooks(paths: Sequence[str]) -> list[Hook]:
    """Import and build hooks, in the process of the job.

    Args:
        paths: the addresses of their classes.

    Raises:
        UserError: a class cannot be imported or built, or is not a hook.
    """
    hooks: list[Hook] = []
    found: list[str] = []
    for path in paths:
        try:
            hooks.append(_build(path))
        except UserError as error:
            found += error.problems
    if found:
        raise UserError(*found)
    return hooks


def _build(path: str) -> Hook:
    """Return the hook at the address `path`.

    Raises:
        UserError: the class cannot be imported or built, is not a hook, or has an unknown method `after_...`.
    """
    cls = load_class("hooks", path)
    if not issubclass(cls, Hook):
        raise UserError(
            f"hooks must name subclasses of rlhf.Hook (the run calls their methods), got {path!r}; write "
            f"class {cls.__name__}(rlhf.Hook)"
        )
    unknown = sorted(name for name in dir(cls) if name.startswith("after_") and name not in METHODS)
    if unknown:
        close = get_close_matches(unknown[0], METHODS, n=1) or sorted(METHODS)
        raise UserError(
            f"hooks must have only the methods {', '.join(sorted(METHODS))} that begin with after_ (no other "
            f"method is called), got {path!r} with {unknown[0]}; rename it {close[0]}"
        )
    try:
        return cls()
    except Exception as error:  # the user's code may raise any exception
        raise UserError(
            f"hooks must name classes that can be built without arguments ({type(error).__name__}: {error}), "
            f"got {path!r}; correct {cls.__name__}.__init__"
        ) from error
