"""The grammar of claims, and that of tables.

    quantity(methods) < | > number | [factor *] quantity(methods)
    quantity(methods) within margin [of quantity(methods)]

After a side: `at axis=value ...`, `at every axis`, `over axis` (for slopes). At the end: `pooled` (the mean
over the tasks, in place of a verdict for each task). A side without such words has those of the other side.

Quantities are value, loss (the base of the first named axis minus the cell), slope (per doubling of the
axis), at_kl, collapsed, and names of metrics. A claim holds if it holds for every method on the left and on
the right. `same` stands for the method on the left, and `best` for the method with the highest value.

A claim that the grammar cannot express is a Python function, `<file>.py:<function>`. The function gets the
rows and returns {name: one difference per seed}. The claim holds if all means are above 0.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from rlhf.config.metric_names import KNOWN
from rlhf.config.suggestions import suggestion
from rlhf.study.spec import LOSS, QUANTITIES, Axis, Table, Task

SAME, BEST, SLOPE = "same", "best", "slope"
_SIDE = re.compile(r"(?P<quantity>[\w/]+)\((?P<methods>[^()]*)\)(?P<words>[^<>()*]*)")
_WORDS = re.compile(
    r"(?<!\S)(?:over (?P<over>\S+)|at every (?P<every>\S+)|(?:at )?(?P<axis>[^\s=]+)=(?P<value>\S*))"
)
_NUMBER = re.compile(r"(-?\d+\.?\d*(?:e-?\d+)?)(?: (\*|of)(?= ))?")
_POSITIVE = re.compile(r"(?!0*\.?0*$)\d+\.?\d*(e-?\d+)?")
_FUNCTION = re.compile(r"\S+:\w+")


@dataclass(frozen=True)
class Side:
    """One side of a claim: a quantity of methods in a cell."""

    quantity: str
    methods: tuple[str, ...]  # names of methods, `SAME` or `BEST`
    levels: Mapping[str, str] = field(default_factory=dict)  # value of each named axis
    every: tuple[str, ...] = ()  # axes for each of whose values the claim is made
    over: str = ""  # the axis of a slope


@dataclass(frozen=True)
class Formula:
    """A claim: left < or > number + factor * right, or |left - right| < number."""

    text: str  # as in the file
    left: Side | None = None  # None: the claim is a function
    sign: str = ""  # "<", ">" or "within"
    number: float = 0.0  # or the margin of `within`
    factor: float = 1.0
    right: Side | None = None
    pooled: bool = False  # whether the quantities are means over the tasks


def read_formula(text: str) -> Formula | None:
    """Return a claim; None if the text is not of the grammar."""
    if _FUNCTION.fullmatch(text):
        return Formula(text)
    words, pooled = re.subn(r" pooled$", "", text)
    first, sign, second = (re.split(r" (<|>|within) ", words, maxsplit=1) + ["", ""])[:3]
    found = _NUMBER.match(second)
    number, link = (float(found[1]), found[2]) if found else (0.0, "")
    rest = second[found.end() :] if found else second
    if link not in ((None, "of") if sign == "within" else (None, "", "*")):
        return None
    if link is None:  # a number alone: the words after it belong to the left side
        left, right = _side(first + rest), None
    else:
        left, right = _side(first), _side(rest.strip())
        if left is None or right is None:
            return None
        left, right = _placed(left, right), _placed(right, left)
    if left is None:
        return None
    factor, number = (number, 0.0) if link == "*" else (1.0, number)
    return Formula(text, left, sign, number, factor, right, bool(pooled))


def _side(text: str) -> Side | None:
    found = _SIDE.fullmatch(text)
    if found is None or _WORDS.sub("", found["words"]).strip():
        return None
    methods = tuple(filter(None, re.split(r"[\s,]+", found["methods"])))
    words = [*_WORDS.finditer(found["words"])]
    levels = {each["axis"]: each["value"] for each in words if each["axis"]}
    if len(levels) < sum(bool(each["axis"]) for each in words):  # an axis twice
        return None
    every = tuple(each["every"] for each in words if each["every"])
    over = next((each["over"] for each in words if each["over"]), "")
    return Side(found["quantity"], methods, levels, every, over) if methods else None


def _placed(side: Side, other: Side) -> Side:
    """Return a side with the axes of the other side, if the side names none."""
    if side.levels or side.every or side.over:
        return side
    return replace(side, levels=other.levels, every=other.every, over=other.over)


def problems(
    formula: Formula,
    methods: Iterable[str],
    axes: Mapping[str, Axis],
    quantities: Collection[str] = QUANTITIES,
) -> list[str]:
    """Return what is wrong with the names of a claim: a rule for each problem."""
    known, found = [*methods, SAME, BEST], []
    sides = [side for side in (formula.left, formula.right) if side is not None]
    if any(BEST in side.methods for side in sides) and (
        len(sides[0].methods) > 1 or sides[0].every or sides[1:]
    ):
        found.append(f"compare {BEST} with a number")
    if sides and SAME in sides[0].methods:
        found.append(f"have {SAME} on the right only")
    if sides[1:] and sides[0].methods == sides[1].methods and len(sides[0].methods) == 1:
        found.append(f"compare different methods, or {SAME} at other values")
    for side in sides:
        named = [*side.levels, *side.every, *filter(None, [side.over])]
        said = [("methods", m, known) for m in side.methods] + [("axes", axis, [*axes]) for axis in named]
        said += [(f"a value of {a}", v, [*axes[a].values]) for a, v in side.levels.items() if a in axes]
        for what, name, names in said:
            if name not in names:
                guess = suggestion(name, names, " (did you mean {}?)")
                found.append(f"name {what} ({', '.join(names) or 'there are none'}), not {name}{guess}")
        if side.quantity not in (*quantities, SLOPE) and "/" not in side.quantity:
            why = suggestion(side.quantity, [*quantities, SLOPE, *KNOWN], " (did you mean {}?)")
            why = f" (add tasks.<name>.{side.quantity})" if side.quantity in QUANTITIES else why
            found.append(f"be about {', '.join(quantities)}, {SLOPE} or a metric, not {side.quantity}{why}")
        if (side.quantity == SLOPE) != bool(side.over):
            found.append(f"have 'over <axis>' after {SLOPE}, and nowhere else")
        if side.over in axes and not all(map(_POSITIVE.fullmatch, axes[side.over].values)):
            found.append(f"have a slope over an axis of positive numbers, not {side.over}")
        if side.quantity == LOSS and not side.levels and not side.every:
            found.append("say at which value of an axis a loss is meant, as 'at lag=64'")
        axis, value = next(iter(side.levels.items()), ("", ""))
        if side.quantity == LOSS and axis in axes and {*axes[axis].bases.values()} == {value}:
            found.append(f"be about a loss at another value than the base ({axis}={value})")
    return found


def quantities(tasks: Mapping[str, Task]) -> list[str]:
    """Return the quantities that the runs of tasks have: at_kl and at_time need the key of a task."""
    declared = tasks.values() or [Task(at_kl=1, at_time=1)]
    return [each for each in QUANTITIES if any(getattr(task, each, 0) is not None for task in declared)]


def read_table(text: str, known: Collection[str], axes: Collection[str]) -> Table | tuple[str, str, str]:
    """Return the table of a text such as "loss over lag as the loss"; else rule, value and remedy.

    Args:
        text: the text.
        known: the quantities that runs have, beside metrics.
        axes: the axes.
    """
    said, _, title = text.partition(" as ")
    quantity, over, axis = said.partition(" over ")
    quantity = quantity.removeprefix("value ").strip()
    if quantity not in known and "/" not in quantity:
        guess = suggestion(quantity, [*known, *KNOWN], "did you mean {}?") or "write value over <axis>"
        remedy = f"add tasks.<name>.{quantity}" if quantity in QUANTITIES else guess
        return f"must be <quantity> over <axis> ({', '.join(known)}, or a metric)", text, remedy
    if quantity == LOSS and not over:
        return "must be over an axis", text, f"write {LOSS} over <axis>"
    if over and axis not in axes:
        guess = suggestion(axis, axes, "did you mean {}?") or "choose one of them"
        return f"must be over an axis ({', '.join(axes) or 'there are none'})", axis, guess
    return Table(quantity, axis, title)
