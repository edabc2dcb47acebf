"""The texts of `--help`: an overview, options and keys of a group, all keys. This module imports no torch."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

from rlhf.config.schema import Choice, fact, section_class
from rlhf.core.errors import UserError
from rlhf.words.catalogue import conf_dir, groups, options, options_of
from rlhf.words.mistakes import shown
from rlhf.words.suggestions import suggestion

WIDTH = 80
GROUPS = {  # group -> meaning
    "algo": "The algorithm. sft and reward train on stored responses.",
    "model": "The models. model.policy=<hub name or folder> sets your own.",
    "task": "The data. task=local task.path=<file or folder> reads your own.",
    "generator": "What samples responses: Hugging Face, vLLM or stored data.",
    "environment": "What answers the replies of the model, over several turns.",
    "clock": "The time of this machine, or the virtual time of a cluster.",
    "backend": "What trains: plain torch or DeepSpeed ZeRO.",
    "scorer": "The reward. scorer@gold=<option> is the judge of evaluations.",
    "logger": "Where metrics go, in addition to metrics.jsonl.",
    "correction": "Presets of algo.correction, for samples of an older policy.",
    "hardware": "Number and roles of the GPUs.",
    "experiment": "Published recipes, named <task>_<size>_<algorithm>[_<variant>].",
    "sweep": "Published studies and a search (lr), with -m.",
    "debug": "A test run of any recipe, with tiny models and data.",
}
KEYS = {  # key -> meaning, for the overview
    "schedule.total_episodes": "responses in the whole run",
    "schedule.total_epochs": "passes over the data, for stored responses",
    "schedule.prompts_per_update": "N, prompts of a rollout batch",
    "algo.samples_per_prompt": "K, responses per prompt",
    "schedule.max_lag": "0: synchronous; n: up to n batches ahead",
    "generator.response_length": "maximum response length in tokens",
    "task.max_prompt_tokens": "longer prompts are skipped",
    "optim.lr": "learning rate",
    "backend.micro_batch": "sequences per forward pass",
    "model.policy": "hub name or folder; for SFT model.base",
    "scorer.path": "reward model, or <file>.py:<function>",
    "resume": "auto, never (start again) or must",
}
LONG = 20  # groups with more options are named, not listed

_OVERVIEW = """\
Train language models from human feedback, synchronously or asynchronously.

Usage: python -m rlhf.train [group=option ...] [key=value ...]

Groups and options       --help <group> describes options and keys of a group
{groups}

Most used keys           --help keys describes all keys, --help <key> one key
{keys}

Examples
  python -m rlhf.train                            default run: CPU, no download
  python -m rlhf.train algo=ppo optim.lr=1e-5     another algorithm and value
  python -m rlhf.train -m algo=dpo,ppo seed=1,2   sweep: one run per combination
  python -m rlhf.train experiment=tldr_410m_dpo debug=tiny      test of a recipe
  python -m rlhf.train algo=reward --cfg job      print the config, run nothing

Other commands: {commands}
The same command resumes a run. --config-dir <folder> adds your own options."""
COMMANDS = (
    *("inspect", "plan", "pipeline", "evaluate", "extend"),
    *("relabel", "sample", "serve", "study", "report"),
)


def help_text(topics: Sequence[str]) -> str:
    """Return the text of `--help`, or of `--help <topic>` for each topic.

    A topic is a group, a section, a key, the end of a key, or `keys`.

    Raises:
        UserError: a topic does not exist.
    """
    parts: list[str] = []
    known = ["keys", *groups(), *_key_sections()]
    for topic in topics:
        if topic in known:
            parts += _every_key() if topic == "keys" else about(topic)
        elif found := _keys_named(topic):
            parts += [line for key, means in found.items() for line in row(key, means, 2, 34)]
        else:
            group = next((group for group in groups() if topic.lower() in options(group)), None)
            guess = f"see --help {group}" if group else None
            guess = guess or suggestion(topic, [*known, *all_meanings()], "did you mean --help {}?")
            rule = (
                f"--help must be followed by keys, a group ({', '.join(dict.fromkeys(known[1:]))}) or a key"
            )
            raise UserError(f"{rule}, got {topic}; {guess or 'see --help'}")
    return "\n".join(parts) if topics else _overview()


def _overview() -> str:
    """Return the text of `--help` without a topic."""
    keys = [line for key, means in KEYS.items() for line in row(key, means, 2, 30)]
    commands = textwrap.fill(", ".join(f"rlhf.{name}" for name in COMMANDS), WIDTH - 16)
    return _OVERVIEW.format(
        groups="\n".join(line for group in groups() for line in _group_lines(group)),
        keys="\n".join(keys),
        commands=commands.replace("\n", "\n" + " " * 16),
    )


def _group_lines(group: str) -> Iterator[str]:
    """Yield the lines of a group: its meaning, and its options. Of a long group, only options of the user."""
    names = list(options(group))
    if len(names) > LONG:
        shipped = {path.stem for path in (conf_dir() / group).glob("*.yaml")}
        own = [name for name in names if name not in shipped]
        names = own or [f"{len(names)} options: --help {group}"]
    yield from row(group, GROUPS.get(group, ""), 2, 12)
    yield from row("", "  ".join(names), 2, 12)


def about(topic: str) -> Iterator[str]:
    """Yield the lines about a group or a section: the meaning, the options and the keys."""
    if topic in groups():
        yield f"{topic}=<option>    {GROUPS.get(topic, '')}".rstrip()
        for name, means in options(topic).items():
            yield from row(name, means, 2, 24)
    if topic in _key_sections():
        yield f"Keys of {topic}: {topic}.<key>=<value>"
        yield from _key_lines(topic, classes(topic))


def _every_key() -> Iterator[str]:
    """Yield the lines of all keys."""
    yield "Keys: <key>=<value>. The value in brackets is the default of the first option."
    for section in ("", *_key_sections()):
        yield from _key_lines(section, classes(section))


def _key_lines(section: str, owners: Sequence[type]) -> Iterator[str]:
    """Yield the lines of the keys of a section; see `_meanings`."""
    for key, means in _meanings(section, owners):
        yield from row(key, means, 2, 34)


def all_meanings() -> Mapping[str, str]:
    """Return the meaning of every key."""
    return {
        key: means
        for section in ("", *_key_sections())
        for key, means in _meanings(section, classes(section))
    }


def _keys_named(topic: str) -> Mapping[str, str]:
    """Return the meaning of each key that a topic names: a key, a section of keys, or the end of keys.

    An example of a section is `model.lora`; an example of the end of a key is `max_lag`.
    """
    found = all_meanings()
    below = {key: means for key, means in found.items() if key == topic or key.startswith(f"{topic}.")}
    return below or {key: means for key, means in found.items() if key.endswith(f".{topic}")}


def _meanings(section: str, owners: Sequence[type]) -> Iterator[tuple[str, str]]:
    """Yield the keys of a section, with their meanings, and, except for the root, of the sections below it.

    Args:
        section: the dotted key of the section; "" is the root.
        owners: the classes that declare the keys. A key of several classes is listed once.
    """
    seen = {"name"}
    for cls in owners:
        hints = get_type_hints(cls)
        for field in fields(cls):
            hint = hints[field.name]
            if field.name in seen:
                continue
            seen.add(field.name)
            key = f"{section}.{field.name}" if section else field.name
            if (below := section_class(hint)) is not None:
                if section:
                    yield from _meanings(key, [below])
                continue
            default = None if field.default in (MISSING, "???") else f" [{shown(field.default)}]"
            owner = next(c for c in reversed(cls.__mro__) if field.name in vars(c).get("__annotations__", {}))
            means = "; ".join(part.rstrip(".") for part in meaning(owner, field.name, hint)).replace("`", "")
            yield key, f"{means}{default or ''}"


def meaning(owner: type, name: str, hint: Any) -> list[str]:
    """Return the meaning of a key and of its choices, as one text each.

    Args:
        owner: the section class that declares the key.
        name: the field of the key.
        hint: the type of the field.
    """
    text = fact(owner, name, "means")
    parts = [text] if text else []
    for each in (hint, *get_args(hint)):
        if isinstance(each, type) and issubclass(each, Choice):
            if not parts:
                parts.append(summary(each))
            parts += [f"`{choice.value}`: {choice.means}" for choice in each if choice.means]
    return parts


def summary(cls: type) -> str:
    """Return the first paragraph of the docstring of a class."""
    return " ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split())


def _key_sections() -> list[str]:
    """Return the names of the sections of the config, such as `schedule`."""
    from rlhf.config.root import Config

    hints = get_type_hints(Config)
    return [field.name for field in fields(Config) if section_class(hints[field.name]) is not None]


def classes(section: str) -> list[type]:
    """Return the classes that declare the keys of a section: the base class, then those of the options."""
    from rlhf.config.root import Config

    if not section:
        return [Config]
    base = section_class(get_type_hints(Config)[section])
    assert base is not None
    return [base, *options_of(base)]


def row(left: str, right: str, indent: int, width: int) -> Iterable[str]:
    """Return the lines of a row with two columns; the second column is wrapped at 80 columns.

    Args:
        left: the first column. If it does not fit, the second column begins in the next line.
        right: the second column.
        indent: spaces before the first column.
        width: width of the first column.
    """
    margin = " " * (indent + width)
    first = f"{'':{indent}}{left:{width}}"
    before = [] if len(first) == len(margin) and (not left or first.endswith(" ")) else [first.rstrip()]
    start = margin if before else first
    wrapped = textwrap.wrap(
        right, WIDTH, initial_indent=start, subsequent_indent=margin, break_on_hyphens=False
    )
    return [*before, *(wrapped or ([] if before else [first.rstrip()]))]
