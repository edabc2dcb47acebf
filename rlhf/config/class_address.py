"""Classes named in a config: `<module>:<Class>` or `<file>.py:<Class>`. This module imports no torch."""

from __future__ import annotations

from difflib import get_close_matches

from rlhf.config.address import FORM, file_of, load, missing, readable_source
from rlhf.core.errors import UserError


def class_problem(key: str, path: str) -> str | None:
    """Return the error message for the address of a class; None if nothing is wrong with it.

    The file of the class is read, not executed. Problems that only its execution shows are found by
    `load_class`.

    Args:
        key: the config key of the address.
        path: the address.
    """
    match = FORM.fullmatch(path)
    if match is None:
        return (
            f"{key} must be <module>:<Class> or <file>.py:<Class> (it names a Python class), got {path!r}; "
            f"set {key}=[my_module:MyClass]"
        )
    place, name = match["place"], match["function"]
    if reason := missing(place):
        return (
            f"{key} must name a class in an existing module or file ({reason}), got {path!r}; run the "
            f"command in the folder that contains it, or set {key}=[<path of the file>.py:{name}]"
        )
    if (file := file_of(place)) is None:
        return None
    source = readable_source(key, path, file)
    if isinstance(source, str):
        return source
    return _no_class(key, path, source.classes) if source.lacks(name) else None


def load_class(key: str, path: str) -> type:
    """Import and return the class at an address of valid form.

    Raises:
        UserError: the module cannot be imported, or has no such class.
    """
    name = path.rpartition(":")[2]
    module = load(key, path)
    found = getattr(module, name, None)
    if not isinstance(found, type):
        own = [each for each, value in vars(module).items() if isinstance(value, type)]
        raise UserError(_no_class(key, path, own))
    return found


def _no_class(key: str, path: str, classes: list[str]) -> str:
    """Return the message for a module that has `classes`, but no class of the name in `path`."""
    place, _, name = path.rpartition(":")
    has = f"there is no class {name} in it" + (f", only {', '.join(classes[:5])}" if classes else "")
    close = get_close_matches(name, classes, n=1) or classes[:1]
    remedy = f"did you mean {key}=[{place}:{close[0]}]?" if close else f"write the class in {place}"
    return f"{key} must name a class of {place} ({has}), got {path!r}; {remedy}"
