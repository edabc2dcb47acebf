"""Rules between settings: algorithms, schedules, scorers, names, generators, the order of rollouts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from rlhf.checks import rules
from rlhf.checks.rules import Allowed, When, chosen, doubt, is_set, rule, training_rule
from rlhf.config.algorithms import Trains
from rlhf.config.root import Config, threads
from rlhf.config.run import MOST_EPISODES, Optimizer
from rlhf.config.schema import data_file, missing_package, plain, sections, value_at
from rlhf.config.scorers import ScorerConfig, scorers
from rlhf.core.files import files, shared
from rlhf.core.launched import cpu_cores, local_world_size, world_size
from rlhf.core.machine import this_machine
from rlhf.memory.plan import device
from rlhf.words import catalogue
from rlhf.words.catalogue import chosen_by, group_of, option_files, options, read_overrides
from rlhf.words.compose import GROUPS
from rlhf.words.mistakes import KNOWN, closest, lacking

# Rows between the algorithm, the schedule, the scorer, the generator, the order of rollouts and the clock.


def _adds_up(scorer: ScorerConfig) -> bool:
    """Return whether the score is a sum of the scores of several parts."""
    functions = isinstance(value_at(scorer, "path"), list) and bool(scorer.functions())
    return functions or (bool(scorer.parts) and not scorer.of_mixture)


def _annotates(cfg: Config) -> bool:
    """Return whether another process scores responses and has the reference."""
    return cfg.generator.annotates(cfg.schedule.max_lag, world_size(), device(cfg, this_machine()) == "cuda")


_OF_DATA = "for algo={algo} generator={generator}"

STORED_PAIRS = When(_OF_DATA, lambda cfg: not cfg.generator.rollouts and cfg.reads_pairs)
STORED_TEXTS = When(_OF_DATA, lambda cfg: not cfg.generator.rollouts and not cfg.reads_pairs)
NEW_SAMPLES = When(
    "with generator={generator}", lambda cfg: cfg.generator.samples and not cfg.algo.supervised
)
COLOCATED = When("with generator=vllm_colocated", lambda cfg: cfg.generator.shares_gpu)
UNCHECKED = When("without a judge or scorer of answers", lambda cfg: not cfg.checks_answers)
UNJUDGED = When(
    "without a scorer of new responses, a judge and evaluations",
    lambda cfg: not cfg.scores_completions or cfg.gold.name == "none" or not cfg.schedule.eval_every,
)
NO_PROCESS = When("without a generator in a process of its own", lambda cfg: not cfg.has_worker)
EACH_SAMPLES = When("a sampler each", lambda cfg: cfg.generator.on_each_rank(cfg.schedule.max_lag))
RANKS = When("with several ranks", lambda cfg: world_size() > 1)
RANKS_HERE = When("with several ranks on one host", lambda cfg: local_world_size() > 1)
_METRIC = "with objective_metric={objective_metric}"
EVALUATED = When(_METRIC, lambda cfg: (cfg.objective_metric or "").startswith("eval/"))
LAG = When("with schedule.max_lag above 0", lambda cfg: cfg.schedule.max_lag > 0)
IDLE = When("", lambda cfg: cfg.generator.replicas > max(1, cfg.schedule.max_lag))
VIRTUAL = When("with clock=virtual", lambda cfg: cfg.clock.virtual)
WALL = When("with clock=wall", lambda cfg: not cfg.clock.virtual)
OTHER_START = When("with model.reference", lambda cfg: not cfg.model.starts_as_reference)
ANNOTATES = When("with schedule.max_lag={schedule.max_lag}", _annotates)
NO_TEACHER = When(
    "for algo={algo} without algo.reward_coef",
    lambda cfg: value_at(cfg, "algo.reward_coef") == 0 and cfg.model.starts_as_reference,
)
_UNTAUGHT = "without task.teacher_column"
SAME_PROMPTS = When(_UNTAUGHT, lambda cfg: cfg.task.teacher_column is None and not cfg.stand_ins)
NO_COLUMN = When("with task={task}", lambda cfg: cfg.task.embedded or bool(cfg.task.parts))
FEW_SLOTS = When(
    "with fewer clock.slots than samples",
    lambda cfg: int(chosen(cfg, "clock.slots") or 0) < cfg.algo.samples_per_prompt,
)

NO_LENGTH = When("without schedule.total_epochs", lambda cfg: cfg.epochs is None)
WITHOUT_REFERENCE = When("with algo={algo}", lambda cfg: cfg.algo.trains is not Trains.policy)
PUNISHES = When("", lambda cfg: any(is_set(cfg, f"scorer.missing_eos_{key}") for key in ("score", "penalty")))

SAMPLES = Allowed("be one that samples", lambda generator: generator.rollouts)
IN_PARTS = Allowed("be hf", lambda generator: generator.samples_parts or not generator.samples)
ZERO = Allowed("be off for training", lambda value: value == 0)
FULL = Allowed("be off for training", lambda value: value == 1)
WARM = Allowed("be >= 0.01", lambda value: not 0 < value < 0.01)
SUM = Allowed("be weighted or a list of functions", _adds_up)
TEACHER = Allowed("name a teacher", lambda name: False)
ENOUGH = Allowed("be >= algo.samples_per_prompt", lambda slots: slots is None)

rules.add_rows("settings", globals())


# Rules for the length of a run, for equal parts of batches, and for replay.


@training_rule
def _objective_metric(cfg: Config) -> Iterator[str]:
    name = cfg.objective_metric
    if name is not None and (found := lacking(name, cfg)):
        guess = closest(name, KNOWN) or name
        fix = "null" if lacking(guess, cfg) else guess
        yield f"objective_metric must {found[0]}, got {name}; set objective_metric={fix}"


@training_rule
def _length(cfg: Config) -> Iterator[str]:
    episodes = cfg.schedule.total_episodes
    per_update = cfg.episodes_per_update
    if episodes is None or not 1 <= episodes <= MOST_EPISODES or per_update < 1:
        return
    if episodes % per_update:
        rule = f"be divisible by the {per_update} episodes of an update"
        right = _nearest_multiple(episodes, per_update)
        reason = "schedule.prompts_per_update x algo.samples_per_prompt"
        yield cfg.refused("", "schedule.total_episodes", rule, reason, right)


@training_rule
def _division(cfg: Config) -> Iterator[str]:
    key, parts = "schedule.prompts_per_update", cfg.schedule.minibatches
    prompts = cfg.schedule.prompts_per_update
    equal = "schedule.minibatches (minibatches are equal parts of the prompts)"
    whole = "algo.samples_per_prompt (the samples of one prompt are never split)"
    for divided, value, by, part in (
        (key, prompts, equal, parts),
        ("backend.micro_batch", cfg.backend.micro_batch, whole, cfg.algo.samples_per_prompt),
    ):
        if value >= 1 and part >= 1 and value % part:
            yield (
                f"{divided} must be divisible by {by}, got {value} and {part}; "
                f"set {divided}={_nearest_multiple(value, part)}"
            )
    ranks = world_size()
    in_minibatch, rule = prompts // max(parts, 1), f"must give each of the {ranks} ranks a prompt"
    if 1 <= in_minibatch < ranks:
        yield (
            f"{key} {rule} (each minibatch is divided among the ranks), got {in_minibatch}; start fewer "
            f"ranks, or set {key}={ranks * parts}"
        )
    if 1 <= cfg.eval.prompts < ranks:
        yield (
            f"eval.prompts {rule} (the held-out prompts are divided among the ranks), got "
            f"{cfg.eval.prompts}; start fewer ranks, or set eval.prompts={ranks}"
        )


@training_rule
def _bitsandbytes_is_installed(cfg: Config) -> Iterator[str]:
    if cfg.optim.optimizer is Optimizer.adamw_8bit and cfg.backend.any_optimizer:
        option, otherwise = "optim.optimizer=adamw_8bit", "set optim.optimizer=adamw"
        yield from missing_package(option, "bitsandbytes", "bnb", otherwise=otherwise)


@doubt
def _never_reached(cfg: Config) -> Iterator[str]:
    schedule = cfg.schedule
    if schedule.total_episodes is None or cfg.episodes_per_update < 1:
        return
    updates = cfg.num_updates()
    steps = updates * schedule.minibatches * schedule.epochs
    if schedule.max_lag >= updates > 0:
        yield f"schedule.max_lag={schedule.max_lag} is never reached in a run of {updates} updates"
    if schedule.replay > updates > 0:
        yield f"schedule.replay={schedule.replay} batches are never reached in a run of {updates} updates"
    if cfg.optim.warmup >= max(1, steps):
        yield (
            f"optim.warmup={plain(cfg.optim.warmup)} lasts the whole run of {steps} optimizer steps, so "
            "the learning rate never reaches optim.lr"
        )


def _nearest_multiple(value: int, of: int) -> int:
    """Return the multiple of `of` that is closest to `value`, at least `of` itself."""
    return max(1, round(value / of)) * of


# Rules for scorers: which scorer can score which task, and whether training sees its judge.


@rule
def _scorers_fit(cfg: Config) -> Iterator[str]:
    for at, scorer in scorers(cfg):
        key, judges, task = chosen_by(at), at.startswith("gold"), cfg.task
        if (cfg.gold if judges else cfg.scorer).of_mixture:  # each part scores a part of the task
            task = task.parts.get(at.partition(".parts.")[2].partition(".")[0], task)
        saved = cfg.generator.saved_rollouts is not None and not judges
        stored = scorer.group[0] > 1 and not (judges or cfg.generator.samples)
        (least, most), count = scorer.group, cfg.algo.samples_per_prompt
        with_count = f"with algo.samples_per_prompt={count}"
        wrong_count = not (judges or least <= count <= most)
        lacking_columns = f"they lack the columns {', '.join(sorted(scorer.columns))}"
        unable, without = scorer.cannot_score(task), not judges and not cfg.environment.answers
        no_rewards = f"with environment={chosen(cfg, 'environment')}"
        for wrong, where, reason, remedy in (
            (scorer.columns and saved, "with saved rollouts", lacking_columns, "scorer=labels"),
            (unable, f"for task={task.name}", unable, f"{key}=reward_model"),
            (stored, "with generator=dataset", "the completions have labels", "scorer=labels"),
            (wrong_count, with_count, f"it compares {least} to {most} responses", f"{at}.kind=grade"),
            (scorer.reads_rewards and judges, "", "references are no episodes", "scorer@gold=none"),
            (scorer.reads_rewards and without, no_rewards, "it gives no rewards", f"{key}=answer"),
        ):
            if wrong:
                rule = f"{key} must not be {scorer.name} {where}".rstrip()
                yield f"{rule} ({reason}), got {scorer.name}; set {remedy}"


@rule
def _parts_of_a_mixture_have_scorers(cfg: Config) -> Iterator[str]:
    tasks = cfg.task.parts
    for at, scorer in (("scorer", cfg.scorer), ("gold", cfg.gold)):
        if not scorer.of_mixture or scorer.cannot_score(cfg.task):
            continue
        for name in (name for name in tasks if name not in scorer.parts):
            yield (
                f"{at}.parts must have a scorer for each part of the task ({', '.join(tasks)}), got "
                f"{', '.join(scorer.parts) or 'none'}; set +scorer@{at}.parts.{name}=<scorer>"
            )
        for name in (name for name in scorer.parts if name not in tasks):
            yield (
                f"{at}.parts must be named like the parts of the task ({', '.join(tasks)}), got {name}; "
                "leave it out"
            )


@rule
def _buffers_fit(cfg: Config) -> Iterator[str]:
    most = cfg.generator.response_length
    for key, buffer in ((f"{at}.overlong_buffer", each.overlong_buffer) for at, each in scorers(cfg)):
        if buffer is not None and buffer > most:
            rule = f"{key} must be <= generator.response_length={most} (it is the last part of that length)"
            yield f"{rule}, got {buffer}; set {key}={most // 4 or 1}"


@training_rule
def _functions_reach_the_annotator(cfg: Config) -> Iterator[str]:
    for at, scorer in scorers(cfg):
        here = [] if at.startswith("gold") else scorer.only_here
        if here and _annotates(cfg):
            reason = "another process scores the responses, see generator.annotate, without the object"
            remedy = "set generator.annotate=false, or write the function in a module"
            rule = "name a function of a module or a file for this run"
            yield scorer.refused(at, "path", rule, reason, remedy=remedy)


@doubt
def _training_sees_its_judge(cfg: Config) -> Iterator[str]:
    if not cfg.generator.samples:
        return
    reward = cfg.model.reward
    judging = {scorer.source(reward): chosen_by(at) for at, scorer in scorers(cfg) if at.startswith("gold")}
    for at, scorer in scorers(cfg):
        judge = judging.get(scorer.source(reward))
        if at.startswith("scorer") and judge is not None and not scorer.verifies:
            yield (
                f"{chosen_by(at)} and {judge} are the same ({scorer.name}): training sees its judge, so "
                "eval/win_rate says nothing about over-optimisation"
            )


# Rules for names: of sections, of `tuned` settings, of recipes, and of the user's files.


COMMAND = re.compile(r"^# Command:\s*(python -m rlhf\.(\w+) .*)$", re.M)  # in the head of a recipe
LIBRARIES: list[str] = data_file("rlhf.checks", "libraries.yaml")


@rule
def _names(cfg: Config) -> Iterator[str]:
    for key, section in sections(cfg):
        name, option = getattr(section, "name", None), catalogue.option_name(type(section))
        if name is None or option is None:
            continue
        known = options("model") if key == "model" else [option]
        if name not in known:
            yield _wrong_name(key, name)


def typed_problems(overrides: Sequence[str]) -> Iterator[str]:
    """Yield an error for each override that Hydra accepts and that no run can have.

    Such an override sets the name of a section (`algo.name=ppo`), removes what every run has (`~seed`), or
    names no file of `tuned`, a group that the defaults list marks as optional.
    """
    needed = [key for key in catalogue.all_keys() if not key.startswith("logger.")]
    for each in read_overrides(overrides):
        at, dot, leaf = each.key.rpartition(".")
        if dot and leaf == "name" and (at in GROUPS or ".parts." in at):
            yield _wrong_name(at, each.value)
        if each.sign == "~" and any(f"{key}.".startswith(f"{each.key}.") for key in needed):
            yield f"{each.key} must not be removed (every run has it), got {each.text}; leave {each.text} out"
        if each.key == "tuned" and each.sign != "~" and each.value not in options("tuned"):
            known = ", ".join(options("tuned"))
            yield f"tuned must be one of {known}, got {each.value!r}; write ~tuned for none"


def _wrong_name(at: str, name: str) -> str:
    """Return the message for a section `at` whose key `name` was set."""
    exists = name in options(group_of(at))
    remedy = f"set {chosen_by(at)}={name}" if exists else f"choose an option with {chosen_by(at)}=<option>"
    return f"{at}.name must not be set (the option of {chosen_by(at)} sets it), got {name}; {remedy}"


def recipes_of_other_commands(overrides: Sequence[str]) -> Iterator[str]:
    """Yield an error for each `experiment=` of the overrides whose recipe is for `rlhf.relabel`."""
    for each in read_overrides(overrides):
        file = option_files("experiment").get(each.value) if each.key == "experiment" else None
        found = COMMAND.search(file.read_text(encoding="utf-8")) if file is not None else None
        if found is not None and found[2] == "relabel":
            yield (
                f"experiment must be a recipe that trains ({each.value} only labels pairs), got "
                f"{each.value}; run: {found[1]}"
            )


@rule
def _libraries_are_not_hidden(cfg: Config) -> Iterator[str]:
    for name in LIBRARIES:
        for file in (Path(f"{name}.py"), Path(name, "__init__.py")):
            found = find_spec(name) if file.is_file() else None
            if found is not None and found.origin is not None and file.samefile(found.origin):
                yield (
                    f"{file} must not have the name of a library (Python imports it instead of {name}), got "
                    f"{file.absolute()}; rename it"
                )


# Rules between the generator and the rest of the config: processes, replicas, cores, transfer, rollouts.


@rule
def _more_threads_than_cores(cfg: Config) -> Iterator[str]:
    trainer, own = (count or 0 for count in threads(cfg))
    cores, here, n = cpu_cores(), local_world_size(), max(1, cfg.generator.replicas)
    each_rank = cfg.generator.on_each_rank(cfg.schedule.max_lag)
    used = trainer * here + own * n * (here if each_rank else 1)
    typed = [name for name in ("generator", "backend") if is_set(cfg, f"{name}.threads")]
    if cfg.has_worker and cfg.schedule.max_lag > 0 and typed and used > max(cores, (1 + n) * here):
        many = (" x generator.replicas", f" x {n}") if n > 1 else ("", "")
        yield (
            f"backend.threads + generator.threads{many[0]} must be <= the cores of this machine (trainer "
            f"and generator run in parallel), got {trainer} + {own}{many[1]} on {cores} cores"
            + (f" of {here} ranks; " if here > 1 else "; ")
            + f"set {typed[0]}.threads=null"
        )


@rule
def _more_replicas_than_requests(cfg: Config) -> Iterator[str]:
    n, lag = cfg.generator.replicas, cfg.schedule.max_lag
    if n > lag + 1 and not cfg.generator.shares_gpu:
        rule, reason = f"be <= schedule.max_lag + 1 = {lag + 1}", "the largest number of requests in flight"
        remedy = f"set schedule.max_lag={n - 1} or generator.replicas={lag + 1}"
        yield cfg.refused("", "generator.replicas", rule, reason, remedy=remedy)


@doubt
def _processes_that_wait(cfg: Config) -> Iterator[str]:
    threads, cores, n = cfg.backend.threads, cpu_cores(), cfg.generator.replicas
    if threads is not None and threads > cores:
        yield (
            f"backend.threads={threads} is more than the {cores} cores that this process may use, so threads "
            f"wait for each other; set backend.threads={cores}"
        )
    if n > 1 and n + local_world_size() > cores:
        yield (
            f"generator.replicas={n} and the trainer share {cores} CPU cores: more processes than cores save "
            "no time unless they sample on GPUs"
        )


@rule
def _saved_rollouts_fit(cfg: Config) -> Iterator[str]:
    path = cfg.generator.saved_rollouts
    if path is None:
        return
    found = files(Path(path).expanduser())
    try:
        common = shared(found[0]) if found else None
        state = "no such files"
    except (OSError, ValueError) as error:
        common, state = None, str(error)
    if common is None:
        yield (
            "generator.path must be a folder of saved rollouts (save_generations=true writes one to the "
            f"run folder), got {path} ({state}); set generator.path=<run folder>/generations"
        )
        return
    for key, theirs in (
        ("generator.temperature", common.temperature),
        ("schedule.prompts_per_update", common.prompts),
        ("algo.samples_per_prompt", common.samples),
    ):
        if value_at(cfg, key) != theirs:
            rule = "be that of the rollouts in generator.path"
            yield cfg.refused("", key, rule, "they are used unchanged", theirs)
    if cfg.schedule.total_episodes is not None and cfg.num_updates() > len(found):
        most = len(found) * cfg.episodes_per_update
        reason = f"generator.path has rollouts of {len(found)} updates"
        yield cfg.refused("", "schedule.total_episodes", f"be <= {most}", reason, most)
