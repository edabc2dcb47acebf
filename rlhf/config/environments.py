"""Sections of the environments (`environment=...`), which answer replies, and of `scorer=environment`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from omegaconf import DictConfig, OmegaConf, read_write

from rlhf.config.schema import Affects, Choice, Section, entry, missing_package, number, option, values
from rlhf.config.scorers import RewardModelScorerConfig, ScorerConfig
from rlhf.core.errors import UserError, one_line
from rlhf.usercode.address import class_problem, function_problem, load_class, signature_of


class OnError(Choice):
    """What follows an error in an environment."""

    stop = "stop", "the run stops"
    end = "end", "the episode ends with error_reward"


@option("environment", "none", part="rlhf.environments.environment:none")
class EnvironmentConfig(Section):
    """No environment: the policy replies once to each prompt."""

    answers: ClassVar[bool] = False  # True: a program answers the replies
    rewards: ClassVar[bool] = False  # True: the program rewards the replies
    tools: ClassVar[list[str]] = []  # the addresses of the functions that replies may call

    name: str = entry("none", added=True)


@dataclass(kw_only=True, slots=True)
class TurnsConfig(EnvironmentConfig):
    """The keys of every program that answers replies."""

    answers: ClassVar[bool] = True
    rewards: ClassVar[bool] = True

    max_turns: int = number(8, "largest number of replies in an episode", least=1)
    reply_tokens: int | None = number(None, least=1, remedy="64")
    """largest number of tokens of a reply; null: all that are left"""
    message_tokens: int = number(512, least=1)
    """largest number of tokens of a message; a longer one loses its middle"""
    role: str = entry("user", "role of the messages in the chat template, such as user or tool")
    threads: int = number(0, least=0, affects=Affects.speed)
    """calls of reset and step at a time; 0: one, for which sampling waits"""
    step_limit_s: float = number(60.0, "seconds that a call may take", above=0, affects=Affects.speed)
    on_error: OnError = entry(OnError.stop, "what follows a call that fails or takes too long", added=True)
    error_reward: float = number(0.0, "reward of an episode that on_error=end ends", added=True)


@dataclass(kw_only=True, slots=True)
class ClassConfig(TurnsConfig):
    """An environment that is a class."""

    address: ClassVar[str]  # of the class, `<module>:<Class>` or `<file>.py:<Class>`

    @property
    def class_arguments(self) -> dict[str, Any]:
        """The arguments of the class: the keys that other environments do not have."""
        shared = {each.name for each in fields(ClassConfig)}
        return {name: value for name, value in values(self).items() if name not in shared}


@option("environment", "calculator", part="rlhf.environments.environment:build")
class CalculatorConfig(ClassConfig):
    """A tool that adds two numbers; the reward is 1 for the right answer to the problem."""

    address: ClassVar[str] = "rlhf.environments.library:Calculator"


@option("environment", "guess_number", part="rlhf.environments.environment:build")
class GuessNumberConfig(ClassConfig):
    """A game that says whether the secret number is higher or lower than a guess."""

    address: ClassVar[str] = "rlhf.environments.library:GuessNumber"

    max_turns: int = 4


@option("environment", "tools", part="rlhf.environments.library:build")
class ToolsConfig(TurnsConfig):
    """Functions, or methods of a class, that a reply may call; a scorer judges the last reply."""

    rewards: ClassVar[bool] = False

    role: str = "tool"
    functions: list[str] = entry(list)
    """<file>.py:<function> or <module>:<function>, with type hints and a docstring that has Args:; or a class
    of such methods"""
    response_template: str | None = entry(None)
    """JSON file with a response template of transformers, which reads calls; null: the model's"""

    @property
    def tools(self) -> list[str]:  # type: ignore[override]
        """The addresses of the functions."""
        return self.functions

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error for each function that cannot be imported."""
        found = (function_problem(f"{at}.functions", address, None) for address in self.functions)
        yield from filter(None, found)


@option("environment", "python", part="rlhf.environments.environment:build")
class PythonEnvironmentConfig(ClassConfig):
    """A class of the user with the methods `reset(example)` and `step(reply)`."""

    path: str | None = entry(None, "<file>.py:<Class> or <module>:<Class>")
    arguments: dict[str, Any] = entry(dict, "arguments of the class, such as {scale: 15}")

    @property
    def address(self) -> str:  # type: ignore[override]
        """The address of the class."""
        assert self.path is not None, "validated"
        return self.path

    @property
    def class_arguments(self) -> dict[str, Any]:
        """The arguments of the class."""
        return self.arguments

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if the class cannot be imported."""
        if self.path is not None and (problem := class_problem(f"{at}.path", self.path)):
            yield problem

    def job_problems(self, at: str) -> Iterator[str]:
        """Yield an error for a class that cannot be imported, lacks a method, or refuses the arguments."""
        try:
            found = load_class(f"{at}.path", self.address)
        except UserError as error:
            yield from error.problems
            return
        if missing := [name for name in ("reset", "step") if not callable(getattr(found, name, None))]:
            reason = f"it has no {' and no '.join(missing)}"
            rule, remedy = "name a class with reset(example) and step(reply)", f"add {missing[0]}"
            yield self.refused(at, "path", rule, reason, remedy=remedy)
        try:
            if signature := signature_of(found):
                signature.bind(**self.arguments)
        except TypeError as error:
            rule = f"be arguments of {self.path}"
            yield self.refused(at, "arguments", rule, str(error), remedy="correct them")


@option("environment", "gymnasium", part="rlhf.environments.environment:build")
class GymnasiumConfig(ClassConfig):
    """An environment of gymnasium; with `task=environment`, its first observations are the prompts."""

    address: ClassVar[str] = "rlhf.environments.library:Gymnasium"

    id: str | None = entry(None, "its name, such as FrozenLake-v1")
    actions: dict[str, Any] = entry(dict)
    """the action that each word means, such as {left: 0}; {}: a reply is the action"""
    options: dict[str, Any] = entry(dict, "further arguments of gymnasium.make")

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if the package is not installed."""
        yield from missing_package("environment=gymnasium", "gymnasium", "gymnasium")

    def job_problems(self, at: str) -> Iterator[str]:
        """Yield an error if gymnasium cannot make the environment, or it does not have the actions."""
        from gymnasium import make, spaces  # optional

        assert self.id is not None, "validated"
        try:
            game = make(self.id, **self.options)
        except Exception as error:  # an environment may raise anything
            rule = f"be an environment that gymnasium makes with {at}.options"
            yield self.refused(at, "id", rule, one_line(error), remedy="correct it")
            return
        space = game.action_space
        for word, action in self.actions.items():
            if not space.contains(action):
                rule = f"be actions of {self.id}, unlike {word}"
                yield self.refused(at, "actions", rule, str(space), remedy="correct it")
        numbers = spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete
        if not self.actions and isinstance(space, numbers):
            rule = f"say which action of {self.id} each word means"
            remedy = f"set +{at}.actions={{<word>: <action>}}"
            yield self.refused(at, "actions", rule, f"{space} has no texts", remedy=remedy)
        game.close()


@option("environment", "openenv", part="rlhf.environments.environment:build")
class OpenEnvConfig(ClassConfig):
    """Sessions of an OpenEnv server, one for each episode of a request; see `gymnasium` for the prompts."""

    address: ClassVar[str] = "rlhf.environments.library:OpenEnv"

    url: str | None = entry(None, "address of the server, http or https")
    action: str = entry("message", "field of an action that has the reply")
    observation: str | None = entry(None)
    """field of an observation that is the message; null: all fields, as JSON"""

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error without `url`, and if the package is not installed."""
        if not (self.url or "").startswith(("http://", "https://")):
            whole = f"http://{self.url or 'localhost:8000'}"
            yield self.refused(at, "url", "begin with http:// or https://", instead=whole)
        yield from missing_package("environment=openenv", "websockets", "openenv")


@option("scorer", "environment", part="rlhf.scorers.scorer:EnvironmentScorer")
class EnvironmentScorerConfig(ScorerConfig):
    """The sum of the rewards that the environment gave for the replies of an episode."""

    reads_rewards: ClassVar[bool] = True


def default_scorer(node: DictConfig) -> DictConfig:
    """Return a config in which the rewards of an environment are the scores, if there is no reward model.

    The default of `scorer` is a reward model. Tasks with another scorer select that, and embedded tasks make
    a reward model.
    """
    types = {key: OmegaConf.get_type(node, key) for key in ("scorer", "environment", "task")}
    own = getattr(types["environment"], "rewards", False) and not getattr(types["task"], "embedded", False)
    if not own or types["scorer"] is not RewardModelScorerConfig or node.scorer.path or node.model.reward:
        return node
    node, shared = node.copy(), [each.name for each in fields(ScorerConfig) if each.name != "name"]
    with read_write(node):
        node.scorer = EnvironmentScorerConfig(**{name: node.scorer[name] for name in shared})
    return node
