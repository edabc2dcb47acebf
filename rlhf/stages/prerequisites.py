"""Artefacts of stages: models and data that are made once, those that a run needs first, and uploads.

This module imports torch only to make an artefact.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Template

from rlhf.assembly.parts import make as make_part
from rlhf.checks.check import TOKEN, problems
from rlhf.config.algorithms import Data, Trains
from rlhf.config.models import LoRAConfig, MovingConfig, paths_in
from rlhf.config.root import Config
from rlhf.config.run import StagesConfig
from rlhf.config.schema import data_file, values
from rlhf.config.scorers import RewardModelScorerConfig, scorers
from rlhf.config.tasks import PREFERENCE_COLUMNS, TaskConfig
from rlhf.core import formatting
from rlhf.core.errors import RunError, UserError
from rlhf.core.files import component, digest, whole
from rlhf.core.launched import derive
from rlhf.loggers.logger import EVALUATION_METRICS, shown
from rlhf.models.folder import is_local
from rlhf.runs.folder import COMPLETE, RunFolder
from rlhf.runs.lock import made_by_one, waiting_claim
from rlhf.terminal.console import Stages, progress, say
from rlhf.words.compose import compose
from rlhf.words.compose import digest as config_digest
from rlhf.words.mistakes import CONFIG_ERRORS, explain

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from rlhf.core.batch import Rollouts


# Artefacts: folders that are complete or absent, made by one process, and skipped once they are finished.
#
# The stages before a run and the stages of `rlhf.pipeline` are lists of artefacts, in the order in which they
# are made.


# Metrics that the summary of the stages shows.
_FIGURES = ("eval/win_rate", "eval/accuracy", "eval/gold_score", "eval/kl", "eval/loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """A model, a data set or an evaluation, and how to make it.

    Attributes:
        name: name for messages.
        folder: where the artefact is written.
        done: returns whether the artefact is finished. Raises UserError if it is damaged.
        make: makes the artefact; resumes if an earlier call was interrupted.
        figures: returns the results of the finished artefact as text.
    """

    name: str
    folder: Path
    done: Callable[[], bool]
    make: Callable[[], object]
    figures: Callable[[], str]


def trained(name: str, folder: RunFolder, make: Callable[[], object]) -> Artefact:
    """Return the final model of the run in `folder`, which `make` carries out."""
    return Artefact(
        name=name,
        folder=folder.path,
        done=lambda: folder.finished() is not None and folder.final_model().is_dir(),
        make=make,
        figures=lambda: result_text((folder.finished() or {"result": {}})["result"]),
    )


def result_text(figures: dict[str, Any]) -> str:
    """Return the main metrics of an evaluation as text."""
    present = [name for name in _FIGURES if name in shown(figures)]
    return ", ".join(f"{EVALUATION_METRICS[name]} {formatting.text(figures, name)}" for name in present)


def made_once(folder: Path, write: Callable[[Path], object]) -> Path:
    """Return `folder`; if it does not exist, make it first, or wait for another process that makes it.

    Args:
        folder: the folder; it is either complete or absent.
        write: function that writes the content into the folder in its argument.
    """
    if not (folder / COMPLETE).exists():
        with made_by_one(folder):
            if not (folder / COMPLETE).exists():
                with whole(folder) as scratch:
                    write(scratch)
                    (scratch / COMPLETE).touch()
    return folder


# Uploads to the Hugging Face hub, for commands with `push_to=<owner>/<name>`.
#
# Without `push_to`, nothing is uploaded. A new repository is private; the visibility of an existing
# repository does not change. The token is that of the variable HF_TOKEN or of `hf auth login`, so that it is
# in no config, no command line and no log.


MEANS = (
    "hub repository <owner>/<name> to push to; a new repository is private; the token is HF_TOKEN or that of "
    "hf auth login (default: nothing is pushed)"
)


def push_run(folder: RunFolder, repository: str) -> None:
    """Upload the final model of a finished run, and print the address of the repository.

    Files that the repository already has are not uploaded again.

    Raises:
        UserError: the model is missing or damaged.
        RunError: the upload failed.
    """
    from huggingface_hub import HfApi, get_token

    model = folder.final_model()
    api = HfApi(token=get_token())  # also if HF_HUB_DISABLE_IMPLICIT_TOKEN is set
    with _uploading(model, repository):
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(model))
    say(f"pushed to {address}")


def push_data(folder: Path, repository: str) -> None:
    """Upload the data set stored in `folder`, and print the address of the repository.

    Raises:
        RunError: the upload failed.
    """
    from datasets import load_from_disk
    from huggingface_hub import get_token

    with _uploading(folder, repository):
        load_from_disk(str(folder)).push_to_hub(repository, private=True, token=get_token())
    say(f"pushed to https://huggingface.co/datasets/{repository}")


@contextmanager
def _uploading(folder: Path, repository: str) -> Iterator[None]:
    """Raise RunError with the first line of the cause if the upload of `folder` in the block fails."""
    try:
        yield
    except Exception as error:  # the exception depends on the HTTP library
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise RunError(
            f"push_to={repository} must be a reachable repository that the token ({TOKEN} or hf auth login) "
            f"may write to, got: {first}; {folder} is complete, and the same command pushes it again"
        ) from error


# Prerequisites of a run of an embedded task: the SFT model, preference pairs, the reward model.
#
# Prerequisites are made for a run that names no models (`model.policy=null`, `model.reward=null`). The
# ordinary training loop trains each model (`algo=sft`, `algo=reward`) once, in a folder of `cache_dir` whose
# name contains a hash of all settings that the result depends on. If two runs need a model at the same time,
# one of them trains the model, and the other one waits.


_Run = Callable[..., object]  # rlhf.stages.run.run, which carries out a run

SFT, PAIRS, REWARD = "SFT model", "preference pairs", "reward model"
_CHUNK = 256  # prompts per request for pairs
_APART = 1000  # between the seeds of the members of an ensemble


def names(cfg: Config, reward: bool = True) -> list[str]:
    """Return the names of the prerequisites of the run `cfg`, finished or not, in their order.

    Args:
        cfg: the config of a run.
        reward: whether the run needs the reward model that the scorer reads.
    """
    if cfg.stand_ins or not cfg.task.embedded or cfg.algo.trains is Trains.base:
        return []
    reads_reward = cfg.algo.trains is Trains.policy and cfg.scorer.reads_reward
    makes_reward = reward and reads_reward and cfg.model.reward is None
    due = {
        SFT: cfg.model.policy is None,
        PAIRS: (cfg.reads_pairs or makes_reward) and cfg.task.preferences_path is None,
        REWARD: makes_reward,
    }
    return [each for name, needed in due.items() if needed for each in _labels(name, cfg)]


def _labels(name: str, cfg: Config) -> list[str]:
    """Return the names of what the stage `name` makes: several for an ensemble of reward models."""
    members = cfg.stages.members if name == REWARD else 1
    return [name] if members == 1 else [f"{name} {number}/{members}" for number in range(1, members + 1)]


def prerequisites(cfg: Config, run: _Run, reward: bool = True) -> tuple[Config, list[Artefact]]:
    """Return `cfg` with the paths of its prerequisites, and the prerequisites of `names(cfg, reward)`.

    Args:
        cfg: the config of a run.
        run: function that trains a model (`rlhf.stages.run.run`).
        reward: whether the run needs the reward model that the scorer reads.

    Raises:
        UserError: the config of a stage has a problem.
    """
    due = {name: cfg for name in (SFT, PAIRS, REWARD) if _labels(name, cfg)[0] in names(cfg, reward)}
    return chain(cfg, due, partial(_model, run=run), _sampled_pairs)


def chain(
    cfg: Config,
    due: dict[str, Config],
    model: Callable[[str, Config], Artefact],
    pairs: Callable[[Config], Artefact],
) -> tuple[Config, list[Artefact]]:
    """Return `cfg` with the paths of what the stages before it make, and these stages.

    Args:
        cfg: the config of a run.
        due: stage -> the run from which it has its settings, in the order in which the stages are made.
        model: function from the name and the config of a stage to the model that it trains.
        pairs: function from the config of a run that reads pairs to the pairs.

    Raises:
        UserError: the config of a stage has a problem.
    """
    algos = {SFT: "sft", REWARD: "reward"}
    stages = {name: checked(stage(due[name], algo)) for name, algo in algos.items() if name in due}
    found: list[Artefact] = []
    paths: dict[str, Any] = {}
    own = cfg.reads_pairs or not cfg.task.embedded  # otherwise the reward stage itself finds its pairs
    for name in due:  # each may need the one before
        if name == PAIRS:
            found.append(pairs((cfg if own else stages[REWARD]).with_(paths)))
            if own:
                paths["task.preferences_path"] = str(found[-1].folder)
        else:
            made: list[str] = []
            for label in _labels(name, cfg):  # the members of an ensemble differ in their seeds
                seed = cfg.stages.seed + _APART * len(made)
                found.append(model(label, stages[name].with_({**paths, "seed": seed})))
                made.append(str(RunFolder(found[-1].folder).model))
            paths["model.policy" if name == SFT else "model.reward"] = made if made[1:] else made[0]
    if not cfg.reads_pairs:
        paths.pop("task.preferences_path", None)
    return cfg.with_(paths), found


def complete(cfg: Config, run: _Run, reward: bool = True, stages: Stages | None = None) -> Config:
    """Make every missing model and data set of an embedded task, and return `cfg` with their paths.

    For a task of the hub, `cfg` is returned unchanged, or with stand-ins if `cfg.stand_ins`.

    Args:
        cfg: the config of a run.
        run: function that trains a model (`rlhf.stages.run.run`).
        reward: whether the run needs the reward model that the scorer reads.
        stages: stages that begin with `names(cfg, reward)`; finished stages are then printed, too.

    Raises:
        UserError: the config of a stage has a problem.
        RunError: a stage had to stop.
        Interrupted: a signal stopped a stage.
    """
    if cfg.stand_ins:
        return complete_stand_ins(cfg)
    cfg, found = prerequisites(cfg, run, reward)
    numbering = stages or Stages([artefact.name for artefact in found])
    for number, artefact in enumerate(found, 1):
        if not artefact.done():
            with numbering.run(number, artefact.folder):
                artefact.make()
        elif stages is not None:
            stages.skip(number, artefact.folder)
    return cfg


def _model(name: str, cfg: Config, run: _Run) -> Artefact:
    """Return the model that the stage `cfg` trains on this rank alone."""

    def make() -> None:
        from rlhf.assembly.models import build_device
        from rlhf.processes.ranks import Ranks

        run(cfg, folder, Ranks(build_device(cfg)), claim=waiting_claim)

    folder = model_folder(cfg)
    return trained(name, folder, make)


def _sampled_pairs(cfg: Config) -> Artefact:
    """Return the preference pairs that are sampled from the policy of `cfg`."""
    folder = pairs_folder(cfg)
    return Artefact(
        name=PAIRS,
        folder=folder,
        done=(folder / COMPLETE).exists,
        make=partial(made_once, folder, partial(_sample_pairs, cfg)),
        figures=lambda: f"ordered by {cfg.gold.described}",
    )


def _sample_pairs(cfg: Config, folder: Path) -> None:
    """Sample pairs for training and held-out prompts, and write the splits train and validation to `folder`.

    A pair, with the columns prompt, chosen and rejected, consists of two samples for a prompt, ordered by
    gold score. Pairs whose gold scores tie are skipped.
    """
    import torch
    from datasets import Dataset, DatasetDict

    from rlhf.assembly.models import build_device, build_tokenizer
    from rlhf.assembly.training import build_sampler, build_scorer, build_task, training_sampling
    from rlhf.processes.ranks import Ranks
    from rlhf.scorers.scorer import response_texts

    tokenizer = build_tokenizer(cfg)
    generator = build_sampler(cfg, tokenizer, cfg.stages.seed)
    gold = build_scorer(cfg, "gold", tokenizer, Ranks(build_device(cfg)))
    assert gold is not None, "an embedded task has a judge"
    task = build_task(cfg, tokenizer, Data.prompts, min(_CHUNK, cfg.stages.pairs), judge=True)

    batches, updates = task.prompts(), -(-cfg.stages.pairs // task.prompts_per_update)
    requests = [("train", next(batches)) for _ in range(updates)]
    held_out = task.held_out(2 * cfg.eval.prompts)  # twice the needed number, because tied pairs are skipped
    requests += [("validation", held_out.select(rows)) for rows in torch.arange(len(held_out)).split(_CHUNK)]
    temperature = cfg.stages.pairs_temperature
    asked = replace(training_sampling(cfg), samples=2, temperature=temperature, purpose="pairs")
    columns = {split: {name: list[str]() for name in PREFERENCE_COLUMNS} for split in ("train", "validation")}
    with progress("sampling pairs", len(requests), cfg.progress.value) as advance:
        for request, (split, prompts) in enumerate(requests):
            rollouts = generator.submit(prompts, replace(asked, request=request)).result()
            scores, texts = gold.compare(*gold.scored(rollouts)), response_texts(rollouts, tokenizer)
            add_pairs(columns[split], rollouts, scores, texts)
            advance(1)
    exchange(columns["train"], cfg.stages.label_noise, cfg.stages.seed)
    data = {split: Dataset.from_dict(rows) for split, rows in columns.items()}
    DatasetDict(data).save_to_disk(str(folder))


def add_pairs(
    columns: dict[str, list[str]], rollouts: Rollouts, scores: Tensor, texts: list[list[str]]
) -> None:
    """Append the pairs of `rollouts` (K = 2) with different scores [N, 2] to `columns`."""
    for prompt, (first, second), (a, b) in zip(rollouts.texts, texts, scores.tolist(), strict=True):
        if a != b:
            columns["prompt"].append(prompt)
            columns["chosen"].append(first if a > b else second)
            columns["rejected"].append(second if a > b else first)


def exchange(columns: dict[str, list[str]], share: float, seed: int) -> None:
    """Exchange the two responses of a share of the pairs; a pair has the same draw whatever follows it."""
    draws, chosen, rejected = random.Random(derive(seed, "noise")), columns["chosen"], columns["rejected"]
    for i in range(len(chosen)):
        if draws.random() < share:
            chosen[i], rejected[i] = rejected[i], chosen[i]


# Configs and folders of the stages before a run: SFT, preference pairs, reward model.


_PLACES = ("output_dir", "cache_dir", "progress")  # keys that a stage has from its run


def model_folder(cfg: Config) -> RunFolder:
    """Return the run folder of the stage with the config `cfg`, for an embedded task."""
    name = component(f"{cfg.algo.name}-{cfg.task.name}-{stage_digest(cfg)}")
    return RunFolder(Path(cfg.cache_dir) / name)


def stage(cfg: Config, algo: str) -> Config:
    """Return the config of the stage `algo` before the run `cfg`.

    The config consists of the defaults of `algo`, the task and model of `cfg`, and the overrides of the stage
    (`stages.sft`, `stages.reward`). The stage of an embedded task uses plain torch, trains all weights and
    has the judge of the task, so that many runs share its result. The stage of another task uses the backend,
    the adapters and the judge of `cfg`.

    Raises:
        UserError: the overrides do not compose.
    """
    own, embedded = cfg.backend, cfg.task.embedded
    overrides = [
        f"algo={algo}",
        f"task={cfg.task.name}",
        f"model={cfg.model.name}",
        f"backend={'torch' if embedded else own.name}",
        f"generator.response_length={cfg.generator.response_length}",
    ]
    if not embedded:
        overrides.append(f"backend.micro_batch={own.micro_batch}")
    overrides += getattr(cfg.stages, algo)
    try:
        made = compose(overrides)
    except CONFIG_ERRORS as error:
        raise _in_stage(algo, [explain(error, overrides)]) from None
    changes = {name: getattr(cfg, name) for name in ("task", "model", "stages", *_PLACES)}
    shared = [name for name in made.backend.for_stages if name in own.for_stages]
    changes |= {f"backend.{name}": getattr(own, name) for name in shared}
    # What no stage needs
    changes |= dict.fromkeys(("model.reference", "model.reward", "task.teacher_column"))
    changes["stages.members"] = 1
    changes["model.moving"] = MovingConfig()
    if embedded:
        changes["model.lora"] = LoRAConfig()
    else:
        changes["gold"] = cfg.gold
    return made.with_({**changes, "seed": cfg.stages.seed, "eval.samples": min(made.eval.samples, 1)})


def checked(cfg: Config) -> Config:
    """Return the config of a stage unchanged, after all checks.

    Raises:
        UserError: a check found a problem; the error lists every problem.
    """
    if found := problems(cfg):
        raise _in_stage(cfg.algo.name, found)
    return cfg


def _in_stage(algo: str, found: list[str]) -> UserError:
    """Return the problems `found` of the stage `algo` as an error."""
    return UserError(*(f"in the stage algo={algo} that this run needs: {text}" for text in found))


def stage_digest(cfg: Config) -> str:
    """Return a hash of the settings that the result of a stage depends on.

    For models and pairs of earlier stages, the hash depends only on the names of their folders, which contain
    hashes.
    """
    policy, pairs = cfg.model.policy, cfg.task.preferences_path
    changes: dict[str, Any] = {
        "task.preferences_path": pairs and _name_in_cache(pairs, cfg),
        "model.policy": policy and _name_in_cache(policy, cfg),
    }
    if cfg.algo.trains is Trains.reward:
        changes |= {"stages.sft": [], "stages.reward": []}
    else:
        changes["stages"] = StagesConfig()  # without the settings of other stages
    return config_digest(cfg.with_(changes))


def _name_in_cache(path: str, cfg: Config) -> str:
    """Return X if `path` is `<cache_dir>/X` or `<cache_dir>/X/model`; return any other path unchanged."""
    made = Path(path).parent if Path(path).name == "model" else Path(path)
    return made.name if made.parent == Path(cfg.cache_dir) else path


def pairs_folder(cfg: Config) -> Path:
    """Return the folder of the preference pairs that are sampled from the policy of `cfg`."""
    depends: dict[str, Any] = {
        "policy": _name_in_cache(cfg.model.policy or "", cfg),
        "task": values(cfg.task),
        "gold": values(cfg.gold),
        "pairs": [cfg.stages.pairs, cfg.stages.pairs_temperature, cfg.stages.seed],
        "lengths": [cfg.generator.response_length, cfg.eval.prompts],
    }
    if cfg.stages.label_noise:
        depends["label_noise"] = cfg.stages.label_noise
    return Path(cfg.cache_dir) / component(f"pairs-{cfg.task.name}-{digest(depends)}")


# Tiny stand-ins for models and data of the hub (`debug=tiny`): every recipe runs offline in seconds.
#
# The data have the columns and splits of the data sets that they replace, so a run uses the same code. The
# policy is trained on the data for a second, until the policy ends its responses and is sometimes correct.
# Reward models are random. Metrics of such a run have no meaning.
#
# A model option of a family in families.yaml has stand-ins with its architecture, and with a chat
# template and special tokens in its form. Other options have stand-ins of Pythia with the plain template.


_Row = dict[str, Any]
_Pair = tuple[str, str]  # prompt and reference
_SIZES = {"train": 64, "validation": 32}  # rows per split
_KNOWN_ROWS = 512  # rows of a user's data whose words get tokens
_WORDS = r" ?\w+|\s| ?#+| ?[^\w\s]"  # regular expression of a token
_POSITIONS = 8192  # maximum sequence length, longer than the sequences of any recipe
_STEPS, _LEARNING_RATE = 60, 1e-2  # for the training of the policy


def complete_stand_ins(cfg: Config) -> Config:
    """Return `cfg` with the paths of stand-ins for the models and data that `cfg` does not name as folders.

    Stand-ins that do not exist are made first.
    """
    digits = digest([values(cfg.task), family(cfg.model.name), cfg.environment.tools])
    folder = Path(cfg.cache_dir) / component(f"stand-ins-{cfg.task.name}-{digits}")
    made_once(folder, partial(_make_stand_ins, cfg, folder))
    cfg = copy.deepcopy(cfg)
    if (folder / "data").is_dir():  # the config names no folder of data
        cfg.task.path = str(folder / "data")
    if (folder / "pairs").is_dir():
        cfg.task.preferences_path = cfg.task.preferences_path or str(folder / "pairs")
    model = cfg.model
    model.base, model.policy = model.base or str(folder / "policy"), model.policy or str(folder / "policy")
    model.reward = model.reward or str(folder / "reward")
    if cfg.algo.distils:
        model.reference = model.reference or str(folder / "teacher")
    for _, scorer in scorers(cfg):
        if isinstance(scorer, RewardModelScorerConfig) and scorer.path:
            own = [each if is_local(each) else str(folder / "judge") for each in paths_in(scorer.path)]
            scorer.path = own if isinstance(scorer.path, list) else own[0]
    return cfg


def family(option: str) -> dict[str, Any]:
    """Return the form of the family of a model option, from families.yaml."""
    known = data_file("rlhf.stages", "families.yaml")
    return dict(next((form for name, form in known.items() if option.startswith(name)), known["pythia"]))


def _make_stand_ins(cfg: Config, final: Path, folder: Path) -> None:
    """Write `data`, `pairs`, and the models, which share a tokenizer.

    The models have about 100,000 parameters, and a head size that vLLM supports.

    Args:
        cfg: the config of the run.
        final: the later path of the stand-ins, for the message.
        folder: the folder to write.
    """
    say(f"making tiny stand-ins for models and data of the hub (once; kept in {final})", style="bold")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    from rlhf.environments.library import schemas

    task, form = copy.copy(cfg.task), family(cfg.model.name)
    made = task.path is None and task.name in _ROWS
    if made:
        task.path = str(folder / "data")
        _write_splits(folder / "data", _ROWS[task.name], task.validation_split)
    pairs = _read(task, form, schemas(cfg.environment.tools))
    if made and task.name != "preferences":
        _write_splits(folder / "pairs", lambda rng: _preference(rng, pairs))
    tokenizer = _make_tokenizer([text for pair in pairs for text in pair], form)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": _POSITIONS,
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if form["type"] != "gpt_neox":
        sizes |= {"num_key_value_heads": 1, "head_dim": 32}
    with torch.random.fork_rng(devices=[]):
        for name, seed in (("policy", 0), ("reward", 0), ("judge", 1), ("teacher", 2)):
            config = AutoConfig.for_model(form["type"], **sizes)
            scores = name in ("reward", "judge")
            config.update({"num_labels": 1} if scores else {})
            torch.manual_seed(seed)
            auto: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
            model = auto.from_config(config)
            if name == "policy":
                _teach(model, tokenizer, pairs[: _SIZES["train"] // (4 if cfg.environment.tools else 1)])
            model.save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)


def _teach(model: Any, tokenizer: PreTrainedTokenizerFast, pairs: list[_Pair]) -> None:
    """Train a causal LM on `pairs` for a few steps."""
    import torch

    texts = [prompt + answer.removesuffix(tokenizer.eos_token) for prompt, answer in pairs]
    rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
    batch = tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        model(**batch, labels=labels).loss.backward()
        optimizer.step()


def _filled(task: str, rng: random.Random) -> _Row:
    """Return a row of stand_ins.yaml for `task`, with random values."""
    form = _STAND_INS[task]
    drawn = {name: rng.choice(values) for name, values in form["values"].items()}
    return {column: Template(text).render(drawn) for column, text in form["row"].items()}


def _chat_row(rng: random.Random) -> _Row:
    """Return a dialogue, with or without a system prompt."""
    row = _filled("chat", rng)
    turns = [("user", row["prompt"]), ("assistant", row.pop("reply"))]
    if rng.random() < 0.5:
        turns.insert(0, ("system", "You are a cook."))
    messages = [{"role": role, "content": content} for role, content in turns]
    return {**row, "prompt_id": f"{rng.getrandbits(64):016x}", "messages": messages}


def _pair_row(rng: random.Random) -> _Row:
    """Return a prompt, which is a dialogue, with a chosen and a rejected response."""
    *prompt, chosen = _chat_row(rng)["messages"]
    other = {"role": "assistant", "content": "Do I know?"}
    return {"prompt": prompt, "chosen": [chosen], "rejected": [other]}


_STAND_INS: dict[str, Any] = data_file("rlhf.stages", "stand_ins.yaml")
_ROWS: dict[str, Callable[[random.Random], _Row]] = {
    "tldr": partial(_filled, "tldr"),
    "gsm8k": partial(_filled, "gsm8k"),
    "chat": _chat_row,
    "preferences": _pair_row,
}


def _preference(rng: random.Random, pairs: list[_Pair]) -> _Row:
    """Return a pair: the reference of a prompt is chosen, the reference of another prompt is rejected."""
    prompt, chosen = rng.choice(pairs)
    rejected = rng.choice([answer for _, answer in pairs if answer != chosen])
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _write_splits(folder: Path, row: Callable[[random.Random], _Row], validation: str = "validation") -> None:
    """Write a file of rows for each split; the file of the validation split has the name `validation`."""
    folder.mkdir(parents=True)
    for split, name in (("train", "train"), ("validation", validation)):
        rng = random.Random(split)
        lines = (json.dumps(row(rng)) for _ in range(_SIZES[split]))
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _read(task: TaskConfig, form: dict[str, Any], tools: list[dict[str, Any]]) -> list[_Pair]:
    """Return the first training examples of the task as pairs of prompt and reference.

    With tools, every other reference is a call, in the format of the chat template of the family `form`.
    """
    rows = make_part(task).prompts("train")
    rows = rows.select(range(min(_KNOWN_ROWS, len(rows))))
    if "messages" in rows.column_names:
        from rlhf.text.chat import Dialogues

        dialogues = Dialogues(_make_tokenizer([], form))  # the chat template needs no vocabulary
        calls = [_call(each["function"]) for each in tools]
        answers = []
        for i, row in enumerate(rows):
            reply = calls[i // 2 % len(calls)] if calls and i % 2 else row["reference_response"]
            prompt, (answer,) = dialogues.write(row["messages"], [reply], tools=tools or None)
            answers.append((prompt, answer))
    else:
        answers = list(zip(rows["query"], rows["reference_response"], strict=True))
    # Without references, the policy learns to repeat words of the prompt, so that it samples some words.
    return [(prompt, answer or " ".join(["", *prompt.split()[:4]])) for prompt, answer in answers]


def _call(tool: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a reply that calls a tool with small arguments, from the description of the tool."""
    needed = tool["parameters"]["properties"].items()
    given = {name: each.get("enum", ["1" if each["type"] == "string" else 1])[0] for name, each in needed}
    called = {"type": "function", "function": {"name": tool["name"], "arguments": given}}
    return [{"role": "assistant", "content": "", "tool_calls": [called]}]


def _make_tokenizer(texts: list[str], form: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word of `texts`, and with the chat template of a family."""
    from rlhf.tasks.source import SPECIAL, word_tokenizer
    from rlhf.text.chat import PLAIN, set_template

    words = {word for text in texts for word in re.findall(_WORDS, text)}
    tokenizer = word_tokenizer(sorted(words - set(SPECIAL)), _WORDS)
    if "template" not in form:
        set_template(tokenizer, PLAIN)
        return tokenizer
    marks = form["tokens"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks, "eos_token": marks[-1]})
    tokenizer.add_tokens(form.get("words", []))
    template = Path(__file__).with_name(form["template"]).read_text(encoding="utf-8")
    tokenizer.bos_token, tokenizer.chat_template = form.get("bos"), form.get("set", "") + template
    return tokenizer
