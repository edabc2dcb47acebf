"""The parameters of a reward function: which values of a response, and which columns, it receives.

A function with a parameter `response` receives its arguments by name. Any other function receives prompt,
response and reference by position. This module imports no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

# Name of a parameter -> the value that the function receives; in lists, if it takes several responses.
VALUES = {
    **{"prompt": "prompt", "response": "response", "reference": "reference", "messages": "messages"},
    **{"prompts": "prompt", "responses": "response", "references": "reference"},
    **{"completion": "response", "completions": "response", "episode": "episode", "episodes": "episode"},
}
GIVEN = frozenset(VALUES)
PLURAL = frozenset({"responses", "completions"})  # names of the responses in a function that takes lists
_BY_POSITION = ("prompt", "response", "reference")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a reward function receives.

    Attributes:
        position: values that it receives by position: none, or prompt, response and reference.
        taken: names of the parameters that receive these values.
        values: name of a parameter -> the value that it receives by name.
        columns: parameters that name a column of the data.
        optional: parameters with a default that receive a column of the data, if there is one.
        rest: the function takes `**kwargs`, and so all other columns.
    """

    position: tuple[str, ...]
    values: dict[str, str]
    columns: tuple[str, ...]
    optional: tuple[str, ...]
    rest: bool
    taken: tuple[str, ...] = ()

    @property
    def asks_columns(self) -> bool:
        """Whether the function receives columns of the data."""
        return bool(self.columns or self.optional or self.rest)

    @property
    def asks_messages(self) -> bool:
        """Whether the function receives the messages of a dialogue."""
        return "messages" in self.values

    @property
    def asks_episode(self) -> bool:
        """Whether the function receives the replies and messages of an episode."""
        return "episode" in self.values.values()


def parameters_of(signature: inspect.Signature | None) -> Parameters:
    """Return what a function receives; None: a built-in function without a signature.

    Raises:
        TypeError: the function cannot be called with these values.
    """
    if signature is None:
        return Parameters(_BY_POSITION, {}, (), (), rest=False)
    every = list(signature.parameters.values())
    named = [each for each in every if each.kind in _NAMED]
    rest = any(each.kind is each.VAR_KEYWORD for each in every)
    position: tuple[str, ...] = ()
    by_position: list[inspect.Parameter] = []
    if not any(VALUES.get(each.name) == "response" for each in named):
        position = _BY_POSITION
        signature.bind_partial(*position)
        taken = [each for each in every if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        by_position = taken[: len(position)]
        named = [each for each in named if each not in by_position]
        if any(each.kind is each.VAR_POSITIONAL for each in every):
            rest = False  # probably a wrapper around a function with other parameters
        _check_order(taken, position)
    elif any(each.kind is each.POSITIONAL_ONLY for each in every):
        raise TypeError("arguments before / have no names")
    values = {each.name: VALUES[each.name] for each in named if each.name in VALUES}
    others = [each for each in named if each.name not in VALUES]
    return Parameters(
        position,
        values,
        columns=tuple(each.name for each in others if each.default is each.empty),
        optional=tuple(each.name for each in others if each.default is not each.empty),
        rest=rest,
        taken=tuple(each.name for each in by_position),
    )


def _check_order(taken: Sequence[inspect.Parameter], position: Sequence[str]) -> None:
    """Raise TypeError if a parameter by position has the name of another value, such as `messages`."""
    for each, value in zip(taken, position, strict=False):
        if VALUES.get(each.name, value) != value:
            raise TypeError(f"without a parameter response, {each.name} would be the {value}")
