"""Tests of part addresses: every part loads and accepts the arguments that the assembly passes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest

import rlhf.config.root  # noqa: F401  # registers the sections
from rlhf.assembly import training as engine_assembly
from rlhf.assembly.parts import make, part
from rlhf.config.run import LoggersConfig
from rlhf.config.schema import PARTS, SCHEMAS, Section
from rlhf.config.tasks import ArithmeticConfig
from rlhf.core.state import TrainState
from rlhf.engines.engine import Engine
from rlhf.models.loading import save
from rlhf.processes.ranks import ALONE
from rlhf.tasks.kinds import ArithmeticSource
from rlhf.words import catalogue
from rlhf.words.compose import compose
from tests.tiny_models import tiny_lm, tiny_tokenizer

catalogue.load_plugins()

OPTIONS = {  # option, as in an override -> the class of its section
    name.removeprefix("schema/").replace("/", "="): section
    for name, section in SCHEMAS.items()
    if section in PARTS
}
CALLED_WITH = {  # group, except backend -> the arguments of its parts
    "algo": ("section",),
    "task": ("section",),
    "scorer": ("section", "context"),
    "generator": ("section", "context"),
    "clock": ("section", "context"),
    "environment": ("section", "tokenizer"),
    "logger": ("section", "context"),
}


def loaded(section: type) -> Any:
    """Return the part at the address of a section class."""
    return part(object.__new__(section))


def subclasses(kind: type) -> Iterator[type]:
    yield kind
    for below in kind.__subclasses__():
        yield from subclasses(below)


def resolved(annotation: object, module: str) -> object:
    """Return the class that an annotation names. A part imports the class of its section for types only."""
    sections = {section.__name__: section for section in subclasses(Section)}
    known = {**sections, **vars(sys.modules[module])}
    return eval(annotation, known) if isinstance(annotation, str) else annotation


def annotated(made: Any) -> Iterator[object]:
    """Yield the types that a part declares for its section: of the attribute `config` and of the argument."""
    if inspect.isclass(made):
        for kind in made.__mro__:
            if "config" in vars(kind).get("__annotations__", {}):
                yield resolved(kind.__annotations__["config"], kind.__module__)
        function: Any = made.build if issubclass(made, Engine) else made.__init__
        _, *arguments = inspect.signature(getattr(function, "__func__", function)).parameters.values()
    else:
        function, arguments = made, list(inspect.signature(made).parameters.values())
    yield resolved(arguments[0].annotation, function.__module__)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_part_of_an_option_loads_and_takes_its_section(option):
    section = OPTIONS[option]
    made, group = loaded(section), option.partition("=")[0]
    assert callable(made) and not inspect.isabstract(made)
    if group != "backend":
        inspect.signature(made).bind(*CALLED_WITH[group])
    for found in annotated(made):
        assert inspect.isclass(found) and issubclass(section, found) and issubclass(found, Section), found


class Built(Exception):
    """Raised in place of building an engine, with the arguments that its backend gets."""


@pytest.fixture
def passed(monkeypatch, tmp_path):
    """`passed(*overrides)` returns the keyword arguments that the engine of a run of a tiny model gets."""
    tokenizer = tiny_tokenizer()
    model = tiny_lm(vocab_size=len(tokenizer), max_position_embeddings=1024)
    save(model, tokenizer, tmp_path)

    def build(_: Section, **given: Any) -> None:
        raise Built(given)

    def call(*words: str) -> dict[str, Any]:
        cfg = compose([f"model.policy={tmp_path}", *words])
        with pytest.raises(Built) as built:
            engine_assembly.build_engine(cfg, tokenizer, ALONE, TrainState(num_updates=1))
        found: dict[str, Any] = built.value.args[0]
        return found

    monkeypatch.setattr(
        engine_assembly,
        "part",
        lambda section: SimpleNamespace(build=build, place=lambda section, module, ranks: module),
    )
    monkeypatch.setattr("rlhf.assembly.models.part", engine_assembly.part)
    return call


@pytest.mark.parametrize("option", [option for option in OPTIONS if option.startswith("backend=")])
def test_engine_of_a_backend_accepts_the_arguments_of_the_assembly_and_the_run(option, passed):
    made, given = loaded(OPTIONS[option]), passed("algo=dpo")
    assert issubclass(made, Engine)
    inspect.signature(made.build).bind("section", **given)
    inspect.signature(Engine.__init__).bind("self", **given)
    inspect.signature(made.prepare).bind("section", "dtype", "ranks")
    inspect.signature(made.place).bind("section", "frozen", "ranks")


def test_only_the_hf_generator_in_float32_computes_the_log_probs_of_the_trainer(passed):
    others = ("generator=vllm", "generator=dataset", "model.dtype=bfloat16")
    assert passed()["settings"].exact_sampler
    assert not any(passed(word)["settings"].exact_sampler for word in others)


def test_every_option_that_chooses_a_part_has_an_address():
    groups = ("algo", "task", "scorer", "generator", "backend", "clock")
    chosen = {name for name in SCHEMAS if name.split("/")[1] in groups}
    chosen |= {f"schema/logger/{logger.name}" for logger in fields(LoggersConfig)}
    assert {"schema/algo/dpo", "schema/logger/wandb", "schema/logger/tensorboard"} < chosen
    assert not {name for name in chosen if SCHEMAS[name] not in PARTS}


def test_a_part_is_made_from_its_section():
    config = ArithmeticConfig(train_size=8)
    source = make(config)
    assert type(source) is ArithmeticSource and source.config is config


def test_unregistered_subclass_of_a_section_has_no_part():
    @dataclass(kw_only=True, slots=True)
    class Other(ArithmeticConfig):
        """A section that is not registered."""

    with pytest.raises(KeyError):
        part(Other(train_size=8))
