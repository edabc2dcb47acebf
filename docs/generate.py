"""Generate reference/commands.md, reference/config.md, the list of coming_from.md, and a table of results.md.

    python docs/generate.py            write the pages
    python docs/generate.py --check    write nothing; exit with 1 if a page is out of date

commands.md is the --help of the commands. config.md has one line per config key. The meaning of a key is its
`means=` (see `number` in rlhf/config/schema.py), else the comment behind its field, else the comment above
the field. The range is the bound of the field. The combinations are the rows of `rlhf.checks`. The list of
reference/coming_from.md is `rlhf.words.mistakes.TABLE`. The table of results.md has the values of a study.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import MISSING as NOTHING
from dataclasses import Field, dataclass, fields, replace
from enum import Enum
from functools import cache
from itertools import product
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlhf.checks import check as all_rules  # noqa: E402, F401  # registers the rules
from rlhf.checks.rules import RULES, TRAINING_RULES, Row, When  # noqa: E402
from rlhf.config.root import Config  # noqa: E402
from rlhf.config.schema import SCHEMAS, Section, fact, plain, section_class  # noqa: E402
from rlhf.words import catalogue, help  # noqa: E402
from rlhf.words.compose import compose  # noqa: E402
from rlhf.words.mistakes import PROJECTS, TABLE, WITHOUT  # noqa: E402

REFERENCE = ROOT / "docs" / "reference"
COMMANDS = (
    *("rlhf.extend", "rlhf.inspect", "rlhf.evaluate", "rlhf.relabel", "rlhf.pipeline", "rlhf.plan"),
    *("rlhf.sample", "rlhf.serve", "rlhf.study", "rlhf.report", "rlhf.audit"),
    *("rlhf.bundle", "rlhf.replay", "rlhf.diff"),
)
SAME = "Groups, options and keys: python -m rlhf.train --help"  # the last line of most help texts
COLUMNS = "110"  # width of the help texts
REQUIRED = "required"
GROUPS = {  # section of the root config -> config group of its options
    "environment": "environment",
    "clock": "clock",
    **{name: name for name in ("algo", "model", "task", "generator", "scorer", "backend", "logger")},
    "gold": "scorer",
}


def main() -> None:
    """Write the pages, or compare them with the files."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is old")
    check = parser.parse_args().check
    old = []
    pages = {"reference/commands.md": commands(), "reference/config.md": config()}
    for name, text in {**pages, "reference/coming_from.md": coming_from(), "results.md": results()}.items():
        page = ROOT / "docs" / name
        if page.exists() and page.read_text(encoding="utf-8") == text:
            continue
        old.append(page.relative_to(ROOT))
        if not check:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(text, encoding="utf-8")
    for page in old:
        print(f"{page}: out of date; run: python docs/generate.py" if check else f"written: {page}")
    if unexplained := re.findall(r"^- `([^`=]+).*: $", config(), re.M):
        print(f"warning: no meaning: {', '.join(unexplained)}", file=sys.stderr)
    sys.exit(1 if check and old else 0)


# -- results.md ------------------------------------------------------------------------------------


def results() -> str:
    """Return the page results.md with its table of methods by lag, in the order of the values at lag 64."""
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    head, mark, tail = page.partition("studies/off_policy/tables/tables.csv -->\n")
    cells: dict[tuple[str, ...], tuple[float, str]] = {}
    with (ROOT / "studies/off_policy/tables/tables.csv").open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            centre, low, high = (float(row[name]) for name in ("centre", "low", "high"))
            cell = centre, f"{centre:.3f} ({low:.3f}, {high:.3f})"
            cells[row["quantity"], row["task"], row["column"], row["method"]] = cell
    lines = []
    for task, value in (("tldr_mini", "win rate"), ("arithmetic", "accuracy")):
        columns = (("value", "lag 0"), ("value", "lag 64"), ("loss", "lag 64"))
        methods = {key[3]: found[0] for key, found in cells.items() if key[:3] == ("value", task, "lag 64")}
        lines += [f"| `{task}` | {value}, lag 0 | {value}, lag 64 | loss |", "|---|--:|--:|--:|"]
        for name in sorted(methods, key=methods.__getitem__, reverse=True):
            shown = " | ".join(cells[quantity, task, column, name][1] for quantity, column in columns)
            lines.append(f"| `{name}` | {shown} |")
        lines.append("")
    return head + mark + "\n" + "\n".join(lines) + "\n" + tail[tail.index("<!-- end -->") :]


# -- coming_from.md --------------------------------------------------------------------------------


def coming_from() -> str:
    """Return the page coming_from.md with its list of keys."""
    page = (REFERENCE / "coming_from.md").read_text(encoding="utf-8")
    head, mark, tail = page.partition("rlhf/words/foreign.txt -->\n")
    lines = []
    for row in TABLE:
        key = row.key if row.value in ("", "<value>") else f"{row.key}={row.value}"
        names = [", ".join(f"`{name}`" for name in each.split()) for each in row.names]
        known = "; ".join(
            f"{project} {found}" for project, found in zip(PROJECTS, names, strict=False) if found
        )
        if not known:  # a name of other programs
            continue
        note = f" ({row.note})" if row.note else ""
        lines.append(f"- {'no key' if key == WITHOUT else f'`{key}`'}{note}: {known}")
    return head + mark + "\n" + "\n".join(lines) + "\n\n" + tail[tail.index("<!-- end -->") :]


# -- commands.md -----------------------------------------------------------------------------------


def commands() -> str:
    """Return the page with the help text of every command."""
    parts = [
        "# Commands",
        "",
        "<!-- generated by docs/generate.py -->",
        "",
        "`python -m rlhf --help` lists the commands, and `python -m rlhf.train --help` groups, options and",
        "the most used keys; [config.md](config.md) has them all. This page shows `--help` of the other",
        "commands. Except for `rlhf.serve`, `rlhf.study`, `rlhf.report`, `rlhf.audit`, `rlhf.bundle`,",
        "`rlhf.replay` and `rlhf.diff`, these accept options and keys, too. Exit codes:",
        "[files.md](files.md#exit-codes).",
    ]
    for name in COMMANDS:
        parts += [
            "",
            f"## {name}",
            "",
            "```text",
            helped(name).removesuffix(SAME).rstrip(),
            "```",
        ]
    return "\n".join(parts) + "\n"


def helped(name: str) -> str:
    """Return the help text of a command.

    Raises:
        SystemExit: the command failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", name, "--help"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": COLUMNS, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stderr}\nerror: python -m {name} --help failed with {done.returncode}")
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())


# -- config.md -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Key:
    """One config key, as it is declared in one section class."""

    field: Field[Any]
    owner: type  # the class that declares the key first
    hint: Any  # type of the value


def config() -> str:
    """Return the page with all config keys."""
    parts = [
        "# Config keys",
        "",
        "<!-- generated by docs/generate.py -->",
        "",
        "This page lists every config key with its default, as on the command line, its type or range in",
        "parentheses, and its meaning. `--cfg job` prints all values of a run without starting it. Choose an",
        "option with `<section>=<option>`; `--help <section>` describes the options, `--help <key>` a key.",
        "",
        "- The default is the value of the section. Options may set other values, which are in",
        "  `conf/<group>/<option>.yaml`. Recipes are in `conf/experiment/`. An option of",
        "  `conf/tuned/` is selected by task, model and algorithm; `~tuned` omits it.",
        f"- {REQUIRED}: there is no default. An option of `algo`, or the command line, sets the value.",
        "- Options with another default follow behind the default, each with its own.",
        "- Keys of `hydra.launcher` are in [hardware](../hardware.md#slurm), those of `hydra.sweeper` in",
        "  [runs](../runs.md#search-for-settings).",
        "",
        "Sections: " + ", ".join(f"[`{name}`](#{name})" for name in ("run", *sections_in_order())) + ".",
        "",
        "## run",
        "",
        "Keys without a section.",
        "",
        *root_keys(),
    ]
    for name in sections_in_order():
        parts += ["", f"## {name}", "", *section(name)]
    parts += ["", "## Combinations", "", *combinations()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


@cache
def sections_in_order() -> tuple[str, ...]:
    """Return the names of the sections of the root config."""
    return tuple(name for name, hint in hints(Config).items() if section_class(hint) is not None)


def section(name: str) -> Iterator[str]:
    """Yield the lines of a section of the root config."""
    base = section_class(hints(Config)[name])
    assert base is not None
    group = GROUPS.get(name)
    if group is None:
        yield from described(base)
        yield from tables(name, [base], {base: [name]}, {})
        return
    if name == "gold":
        yield "The judge, whose scores are not used for training. It has the options and keys of"
        yield "[`scorer`](#scorer): choose with `scorer@gold=<option>`, set keys with `gold.<key>=<value>`."
        return
        yield f"Options: {listed(list(catalogue.options(group)))}."
    yield ""
    registered = {
        cls: options_of(group, cls, path.rpartition("/")[2])
        for path, cls in SCHEMAS.items()
        if path.split("/")[1] == group and issubclass(cls, base)
    }
    yield from tables(name, declaring(registered), registered, {})


def declaring(registered: dict[type, list[str]]) -> list[type]:
    """Return the classes that declare keys of the options `registered`, base classes first."""
    found: list[type] = []
    for cls in registered:
        found += [each for each in reversed(cls.__mro__) if issubclass(each, Section) and each not in found]
    return found


def tables(
    prefix: str, classes: Sequence[type], registered: dict[type, list[str]], shown: dict[tuple[str, str], str]
) -> Iterator[str]:
    """Yield a list for each class that declares keys, and one for each section below it.

    Args:
        prefix: the dotted key of the section.
        classes: classes that may declare keys, base classes first.
        registered: the classes of the options, each with its options.
        shown: key and meaning of the lines so far -> an option of the line; lines are added.
    """
    several = len(registered) > 1
    for cls in classes:
        own = [key for key in keys(cls) if key.owner is cls]
        rows = [key for key in own if section_class(key.hint) is None]
        users = {each: names for each, names in registered.items() if issubclass(each, cls)}
        if rows and several:
            every = len(users) == len(registered)
            names = [name for found in users.values() for name in found]
            yield "Keys of all options:" if every else f"Keys of {listed(names)}:"
            yield ""
        if rows:
            yield from (line(prefix, key, users, shown) for key in rows)
            yield ""
        for key in own:
            if (below := section_class(key.hint)) is not None:
                at = f"{prefix}.{key.field.name}"
                yield f"Section `{at}`: {sentence(help.summary(below))}"
                yield ""
                yield from tables(at, [below], {below: [at]}, shown)


def root_keys() -> list[str]:
    """Return the lines of the keys without a section."""
    plain_keys = [key for key in keys(Config) if section_class(key.hint) is None]
    return [line("", key, {Config: ["run"]}, {}) for key in plain_keys]


def line(prefix: str, key: Key, users: dict[type, list[str]], shown: dict[tuple[str, str], str]) -> str:
    """Return the line of a key: key, default, type, meaning; a meaning in `shown` is not repeated.

    `<` before a letter is escaped outside of code.
    """
    at = f"{prefix}.{key.field.name}" if prefix else key.field.name
    means, values = meaning(key), kind(key)
    unexplained = [choice for choice in re.findall(r"`[^`]+`", values) if f"{choice}: " not in means]
    type_shown = f" ({values})" if unexplained or "`" not in values else ""  # choices that `means` explains
    option = next(iter(users.values()))[0]
    if (first := shown.setdefault((at, means), option)) != option:
        means = f"As for `{first}`."
    text = f"- {defaults(at, users)}{type_shown}: {means}"
    return re.sub(r"(`[^`]*`)|<(?=\w)", lambda found: found[1] or "&lt;", text)


def keys(cls: type) -> list[Key]:
    """Return the keys of a section class, without the name of the option."""
    found = []
    for each in fields(cls):
        if each.name == "name":
            continue
        types = {base: vars(base).get("__annotations__", {}).get(each.name) for base in cls.__mro__}
        owners = [base for base, hint in types.items() if hint and not hint.startswith("ClassVar")]
        found.append(Key(each, owners[-1], hints(cls)[each.name]))
    return found


@cache
def hints(cls: type) -> dict[str, Any]:
    """Return the types of the fields of a section class."""
    every = get_type_hints(cls)
    return {each.name: every[each.name] for each in fields(cls)}


# -- cells -----------------------------------------------------------------------------------------

NAMES = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    Any: "any value",
    NoneType: "null",
}


def kind(key: Key) -> str:
    """Return the type of a key as text, with its range or its choices."""
    text = type_text(key.hint)
    bound = fact(key.owner, key.field.name, "bound")
    if bound is None:
        return text
    limits = {">=": bound.least, ">": bound.above, "<=": bound.most, "<": bound.below}
    rules = [f"{sign} {plain(limit)}" for sign, limit in limits.items() if limit is not None]
    first, *rest = text.split(" or ", 1)
    return " or ".join([f"{first} {' and '.join(rules)}".rstrip(), *rest])


def type_text(hint: Any) -> str:
    """Return a type as text."""
    parts = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(type_text(part) for part in parts)
    if get_origin(hint) is tuple:
        return f"list of {len(parts)} {type_text(parts[0])}"
    if get_origin(hint) is list:
        return f"list of {type_text(parts[0])}"
    if get_origin(hint) is dict:
        return "sections by name" if section_class(parts[1]) else "keys and values"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(f"`{each.value}`" for each in hint)
    return NAMES[hint]


def defaults(at: str, users: dict[type, list[str]]) -> str:
    """Return a key with its default, as on the command line, and the options with other defaults."""
    name = at.rpartition(".")[2]
    by_option = {option: default(cls, name) for cls, options in users.items() for option in options}
    (usual, _), *others = Counter(by_option.values()).most_common()
    parts = [f"`{at}`, {REQUIRED}" if usual == REQUIRED else f"`{at}={usual}`"]
    for value, _ in others:
        parts.append(f"{listed([option for option, own in by_option.items() if own == value])}: `{value}`")
    return "; ".join(parts)


def default(cls: type, name: str) -> str:
    """Return the default of a key as it is typed on the command line."""
    field = next(each for each in fields(cls) if each.name == name)
    value = field.default if field.default_factory is NOTHING else field.default_factory()
    return REQUIRED if value is NOTHING or value == "???" else typed(value)


def typed(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(typed, value))}]"
    if isinstance(value, dict):
        return "{}" if not value else repr(value)
    if isinstance(value, str):
        return value.replace("\n", "\\n")
    return plain(value)


def meaning(key: Key) -> str:
    """Return the meaning of a key: its `means`, or the docstring of its choices."""
    parts = help.meaning(key.owner, key.field.name, key.hint)
    return sentence("; ".join(part.rstrip(".") for part in parts))


def described(cls: type) -> list[str]:
    """Return the first paragraph of the docstring of a class, as lines of a page."""
    return [sentence(help.summary(cls)), ""]


def sentence(text: str) -> str:
    """Return `text` with a capital letter at its start and a full stop at its end."""
    if not text:
        return ""
    first = text.split()[0]
    start = text[:1].upper() + text[1:] if re.fullmatch(r"(?!null)[a-z-]+[,;:]?", first) else text
    return start if start.endswith((".", "!", "?")) else f"{start}."


def listed(names: Sequence[str]) -> str:
    """Return names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


# -- combinations ----------------------------------------------------------------------------------


def combinations() -> Iterator[str]:
    """Yield a line for each rule between sections that concerns the value of one key, by condition."""
    yield "A run that breaks one of these rules does not start. The message of the rule contains a remedy."
    yield ""
    by_condition: dict[str, list[Row]] = {}
    for rule in [*RULES, *TRAINING_RULES]:
        if isinstance(rule, Row):
            by_condition.setdefault(holding(rule.when), []).append(rule)
    for condition, rules in by_condition.items():
        several = len(rules) > 1 and condition
        if several:
            yield f"- {condition[0].upper()}{condition[1:]}:"
        for rule in rules:
            start, end = ("  - ", "") if several else ("- ", f" {condition}".rstrip())
            yield f"{start}`{rule.key}` must {rule.allowed.text}{end}: {rule.because}"


def holding(when: When) -> str:
    """Return the text of a condition, with the options for which it holds in place of `{algo}`."""
    groups = [name for name in re.findall(r"\{(\w+)\}", when.text) if name in GROUPS]
    found: dict[str, list[str]] = {group: [] for group in groups}
    for chosen in product(*(registered(group) for group in groups)):
        cfg = replace(default_config(), **dict(zip(groups, chosen, strict=True)))
        if when.holds(cfg):
            for group, section in zip(groups, chosen, strict=True):
                found[group].append(section.name)
    text = re.sub(r"[\w.]+=[\w.{}]+", r"`\g<0>`", when.text)
    for group, names in found.items():
        text = text.replace(f"{{{group}}}", "`, `".join(dict.fromkeys(names)))
    return re.sub(r"=\{[\w.]+\}", "", text)  # any value of another key


@cache
def default_config() -> Config:
    """Return the config of a run without overrides."""
    return compose([])


@cache
def registered(group: str) -> list[Any]:
    """Return a section with default values for each option of a group."""
    return [cls() for name, cls in SCHEMAS.items() if name.startswith(f"schema/{group}/")]


def options_of(group: str, cls: type, name: str) -> list[str]:
    """Return the options of a group that use the section class registered as `name`."""
    found = []
    for file in sorted((catalogue.conf_dir() / group).glob("*.yaml")):
        entries = (yaml.load(file.read_text(encoding="utf-8"), yaml.BaseLoader) or {}).get("defaults", [])
        if any(
            key.startswith(f"/schema/{group}@") and option == name
            for entry in entries
            if isinstance(entry, dict)
            for key, option in entry.items()
        ):
            found.append(file.stem)
    return found or [name]


if __name__ == "__main__":
    main()
