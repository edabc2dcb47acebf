"""Tests of config section declarations: bounds of numbers, and requirements on the classes of options."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, ClassVar

import pytest
from omegaconf import OmegaConf

from rlhf.config.schema import PARTS, SCHEMAS, Affects, Section, fact, number, option, sections, used, values
from rlhf.config.tasks import TLDRMiniConfig
from rlhf.words.catalogue import declared_keys
from rlhf.words.compose import compose


@dataclass(kw_only=True, slots=True)
class Numbers(Section):
    """A section with one number of each kind."""

    count: int = number(4, least=1, means="things")
    rate: float = number(0.5, above=0, below=1, means="share of things", remedy="0.25")
    share: float | None = number(None, least=0, most=1, means="part of them; null: off", remedy="0.9")
    every: float = number(0.2, least=0, counts="updates")
    """how often"""


@dataclass(kw_only=True, slots=True)
class Fewer(Numbers):
    """A section with another default of an inherited number."""

    count: int = 2


@dataclass(kw_only=True, slots=True)
class Shown(Numbers):
    affects: ClassVar[Affects] = Affects.nothing

    own: int = number(1)
    kept: int = number(1, affects=Affects.result)


def problems(section: Section) -> list[str]:
    return list(section.problems("some"))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"count": 0}, ">= 1 (things), got 0; set some.count=4"),
        ({"rate": 0}, "> 0 and < 1 (share of things), got 0; set some.rate=0.25"),
        ({"rate": 1.0}, "> 0 and < 1 (share of things), got 1; set some.rate=0.25"),
        ({"rate": math.nan}, "finite and > 0 and < 1 (share of things), got nan; set some.rate=0.25"),
        ({"share": -1}, ">= 0 and <= 1 (part of them; null: off), got -1; set some.share=0.9"),
        ({"share": 1.1}, ">= 0 and <= 1 (part of them; null: off), got 1.1; set some.share=0.9"),
        ({"every": math.inf}, "finite and >= 0 (how often), got inf; set some.every=0.2"),
        (
            {"every": 2.6},
            "whole if it is 1 or more: then it counts updates (how often), got 2.6; set some.every=3",
        ),
    ],
)
def test_number_out_of_bounds_gives_one_message_with_a_remedy(values, problem):
    assert problems(Numbers(**values)) == [f"some.{[*values][0]} must be {problem}"]


def test_numbers_within_their_bounds_are_no_problems():
    assert problems(Numbers()) == []
    assert problems(Numbers(count=1, rate=0.99, share=1, every=3)) == []


def test_subclass_with_another_default_keeps_the_bounds_of_its_base():
    assert problems(Fewer(count=0)) == ["some.count must be >= 1 (things), got 0; set some.count=2"]
    assert fact(TLDRMiniConfig, "train_size", "bound") == fact(TLDRMiniConfig.__base__, "train_size", "bound")
    (problem,) = TLDRMiniConfig(train_size=0).problems("task")
    assert problem == "task.train_size must be >= 1 (examples to generate), got 0; set task.train_size=512"


def test_a_class_says_what_the_keys_that_it_declares_affect():
    found = [fact(Shown, name, "affects") for name in ("own", "kept", "count")]
    assert found == [Affects.nothing, Affects.result, Affects.result]


def test_the_conditions_of_keys_name_keys_of_their_section():
    conditions = [(each.section, when) for each in declared_keys() for when in used(each.section).values()]
    assert len(conditions) > 10
    for section, when in conditions:
        named = {key for each in when for key in re.findall(r"(\w+)!?=", each)}
        assert named <= {each.name for each in fields(section)}


def test_option_must_be_a_keyword_only_dataclass_with_slots():
    @dataclass(kw_only=True)
    class Open(Section):
        """A class without slots accepts unknown keys."""

        value: int = 0

    @dataclass(slots=True)
    class Positional(Section):
        """A class with positional fields."""

        value: int = 0

    with pytest.raises(TypeError, match="slots=True"):
        option("algo", "open")(Open)
    with pytest.raises(TypeError, match="kw_only=True"):
        option("algo", "positional")(Positional)
    assert not {"schema/algo/open", "schema/algo/positional"} & SCHEMAS.keys()


def test_a_subclass_does_not_inherit_the_address_of_its_part():
    @dataclass(kw_only=True, slots=True)
    class Other(TLDRMiniConfig):
        """A section that is not registered."""

    assert TLDRMiniConfig in PARTS and Other not in PARTS


def test_sections_are_found_at_any_depth_with_their_keys():
    cfg = compose(["scorer=weighted", "+scorer@scorer.parts.x=facts"])
    keys = [key for key, _ in sections(cfg)]
    assert {"", "algo", "model.lora", "scorer", "scorer.parts.x"} <= set(keys) and len(keys) == len(set(keys))


class Kind(Enum):
    first = "1st"


@dataclass(kw_only=True, slots=True)
class Mixed(Section):
    kind: Kind = Kind.first
    kinds: dict[str, Kind] = field(default_factory=lambda: {"a": Kind.first})
    shares: dict[str, float] = field(default_factory=lambda: {"a": 1})
    sizes: list[float] | None = field(default_factory=lambda: [1, 2.5])
    free: dict[str, Any] = field(default_factory=lambda: {"a": [1, {"b": True}]})
    count: int = 2
    share: float | None = 3
    parts: dict[str, Numbers] = field(default_factory=lambda: {"a": Numbers()})


@pytest.mark.parametrize(
    "section",
    [
        Mixed(),
        Mixed(share=None, sizes=None),
        ["algo=ppo", "logger=[wandb,mlflow]", "backend=zero2", "+backend.deepspeed.steps=[1,2]"],
        ["scorer=weighted", "generator=vllm", "generator.devices=[0,1]"],
        ["task=mixture", "model.lora.targets=[q]"],
    ],
)
def test_values_are_those_of_omegaconf(section):
    section = compose(section) if isinstance(section, list) else section
    by_omegaconf = OmegaConf.to_container(OmegaConf.structured(section), enum_to_str=True)
    found = values(section)
    assert found == by_omegaconf and repr(found) == repr(by_omegaconf)


def test_a_changed_config_is_a_copy_with_other_values_of_dotted_keys():
    cfg = compose(["algo=dpo"])
    lora = replace(cfg.model.lora, rank=8)
    other = cfg.with_({"model.policy": "x/y", "model.lora": lora, "model.lora.alpha": 3.0, "seed": 7})
    assert (other.model.policy, other.model.lora.rank, other.model.lora.alpha, other.seed) == (
        "x/y",
        8,
        3.0,
        7,
    )
    assert (cfg.model.policy, cfg.seed) == (None, 1)
    assert other.task is cfg.task and other.with_({"model": cfg.model, "seed": 1}) == cfg
    with pytest.raises(TypeError, match="polcy"):
        cfg.with_({"model.polcy": "x/y"})
