"""Construction of the models of a run: device, ranks, tokenizer, weights, limits of forward passes."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import datasets
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlhf.assembly.parts import build_source, make, part
from rlhf.config.algorithms import DistillConfig, Trains, ValueFrom
from rlhf.config.models import WITHOUT_GRADIENT, Device, Dtype
from rlhf.config.root import Config
from rlhf.core.batch import Budget
from rlhf.core.errors import OutOfMemory, RunError, UserError
from rlhf.core.launched import PORTABLE, asked_portable, derive
from rlhf.memory.plan import adjustable, halved, smaller_settings, with_token_limit
from rlhf.models import loading
from rlhf.models.folder import first_line
from rlhf.models.forward import build_on_first, checkpoint_blocks
from rlhf.models.modules import ActorCritic, Policy, RewardModel, RolloutModule, ValueModel, adapt, score_head
from rlhf.processes.ranks import Ranks
from rlhf.runs.folder import RunFolder
from rlhf.scorers.teacher import Reference, ServedTeacher
from rlhf.terminal.console import console, say_row
from rlhf.text.chat import set_format
from rlhf.trials.trials import compared
from rlhf.words.compose import not_in_name

# Construction of the models of a run.


_M = TypeVar("_M", bound=RolloutModule)
_N = TypeVar("_N", bound=torch.nn.Module)


def loaded(build: Callable[[], _N], cfg: Config, ranks: Ranks) -> _N:
    """Return the module that `build` returns.

    If the backend divides the weights over the ranks, only the first rank calls `build`, and the other ranks
    get placeholders. A model with code of its own is built on every rank, because other ranks cannot receive
    its classes.
    """
    divides = cfg.backend.footprint().gathered and ranks.size > 1
    return build_on_first(build, ranks) if divides and not cfg.model.trust_remote_code else build()


def build_module(cfg: Config, tokenizer: PreTrainedTokenizerFast) -> Policy | RewardModel | ActorCritic:
    """Return the module that the run trains, with its initial weights; trained weights are float32."""
    module = build_model(cfg, tokenizer)
    if cfg.value_starts_as is None:
        return module
    assert isinstance(module, Policy)
    return ActorCritic(module, _for_training(_build_value_model(cfg, tokenizer), cfg, "value"))


def _loading(cfg: Config) -> dict[str, Any]:
    """Return the keyword arguments for loading a trained model."""
    model = cfg.model
    return {
        "dtype": getattr(torch, model.dtype.value) if model.lora.rank else torch.float32,
        "attention": model.loaded_attention,
        "trust_remote_code": model.trust_remote_code,
    }


def build_model(cfg: Config, tokenizer: PreTrainedTokenizerFast, named: bool = False) -> Policy | RewardModel:
    """Return the policy or reward model that the run trains and saves, with its initial weights.

    Args:
        cfg: the config of the run.
        tokenizer: the policy's tokenizer.
        named: whether the model that `cfg` starts from is itself the result: a reward model keeps its head.
    """
    model = cfg.model
    options = _loading(cfg)
    if cfg.algo.trains is Trains.reward:
        assert model.policy is not None
        if named:
            own = loading.load_reward_model(model.policy, key="models", **options)
            return RewardModel(own, model.shared_prefix)
        rng = torch.Generator().manual_seed(derive(cfg.seed, "reward head"))
        made = loading.new_reward_model(model.policy, tokenizer.pad_token_id, rng, **options)
        return _for_training(RewardModel(made, model.shared_prefix), cfg, "reward")
    if cfg.algo.trains is Trains.base and model.base is None:
        return _for_training(_policy_of(loading.new_nano(model, tokenizer), tokenizer, cfg), cfg, "policy")
    assert cfg.start is not None
    key = f"model.{cfg.algo.trains.value}"
    made = loading.load_causal_lm(cfg.start, key=key, **options)
    return _for_training(_policy_of(made, tokenizer, cfg), cfg, "policy")


def _policy_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, cfg: Config) -> Policy:
    """Return a causal LM as a policy over the tokens of `tokenizer`, at the temperature of the run."""
    tokens = tokenizer.get_vocab().values()
    return Policy(model, cfg.generator.temperature, cfg.model.shared_prefix, cfg.model.float32_head, tokens)


def _for_training(module: _M, cfg: Config, name: str) -> _M:
    """Return `module` with the adapters and the gradient checkpointing that the config sets."""
    if cfg.model.lora.rank:
        adapt(module.model, cfg.model.lora, derive(cfg.seed, "adapters", name))
    if cfg.model.gradient_checkpointing:
        checkpoint_blocks(module.model)
    return module


def _build_value_model(cfg: Config, tokenizer: PreTrainedTokenizerFast) -> ValueModel:
    """Return the initial value model: the reward model, or the policy with a zero value head.

    Raises:
        UserError: the reward model has another tokenizer than the policy.
    """
    model = cfg.model
    options = _loading(cfg)
    if cfg.value_starts_as is ValueFrom.policy:
        assert model.policy is not None
        made = loading.new_reward_model(model.policy, tokenizer.pad_token_id, None, **options)
        torch.nn.init.zeros_(score_head(made).weight)
        return ValueModel(made, model.shared_prefix)
    path = cfg.value_reward
    assert path is not None, "validated: a reward model is named or made"
    own = loading.read_tokenizer(path, model.trust_remote_code, "model.reward")
    if own.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            "algo.value_from must be policy if the reward model has another tokenizer (the value model "
            f"reads the policy's tokens), got reward with {path!r}; set algo.value_from=policy"
        )
    loaded = loading.load_reward_model(path, **options)
    loading.check_vocabulary(loaded, tokenizer, "model.reward")
    return ValueModel(loaded, model.shared_prefix)


def build_reference(cfg: Config, tokenizer: PreTrainedTokenizerFast, ranks: Ranks) -> Reference:
    """Return the frozen reference on the device, whole or sharded as the backend requires.

    The reference is the model that `model.reference` names, otherwise the initial policy. The teacher of a
    distillation may run on a server.

    Raises:
        UserError: the reference has no embedding for a token of the policy's tokenizer.
    """
    model = cfg.model
    name = model.reference or model.policy
    assert name is not None, "validated: a policy is named or made"
    dtype = getattr(torch, "float32" if model.moving.every else model.dtype.value)
    if isinstance(cfg.algo, DistillConfig) and cfg.algo.teacher.url is not None:
        return ServedTeacher(cfg.algo, name, tokenizer)

    def build() -> Policy:
        frozen = loading.load_causal_lm(
            name, dtype, model.loaded_attention, model.trust_remote_code, key="model.reference"
        )
        loading.check_vocabulary(frozen, tokenizer, "model.reference")
        return _policy_of(frozen, tokenizer, cfg)

    placed: Policy = part(cfg.backend).place(cfg.backend, loaded(build, cfg, ranks), ranks)
    return compared(placed, cfg, ranks)


# Construction of the tokenizer of a run.


log = logging.getLogger(__name__)


def build_tokenizer(cfg: Config, notes: dict[str, str] | None = None) -> PreTrainedTokenizerFast:
    """Return the policy's tokenizer; for a model with random weights, the tokenizer of the embedded task.

    If the task has dialogues, the end token is the token that ends a turn in the chat template.

    Args:
        cfg: the config of the run.
        notes: gets the row "pad token" if the model has no pad token, so that one was chosen.

    Raises:
        UserError: the tokenizer cannot be used, or has no chat template for the dialogues of the task.
    """
    name = cfg.model.tokenizer or cfg.start
    if name is None:
        assert cfg.task.embedded, "validated: only embedded tasks start from nothing"
        made: PreTrainedTokenizerFast = make(cfg.task).tokenizer()
        if (model := cfg.model).chat_template is not None or model.thinking is not None:
            set_format(made, model.chat_template, build_source(cfg).conversational, thinking=model.thinking)
        return made
    key = "model.tokenizer" if cfg.model.tokenizer else cfg.start_key
    tokenizer = loading.read_tokenizer(name, cfg.model.trust_remote_code, key)
    reads = cfg.model.clock, cfg.model.thinking
    set_format(tokenizer, cfg.model.chat_template, build_source(cfg).conversational, *reads)
    models = (name,) if cfg.start in (None, name) else (name, cfg.start)
    note = loading.set_pad_token(tokenizer, cfg.model.pad_token, models=models)
    if note is not None and notes is not None:
        notes["pad token"] = note
    return tokenizer


def build_stop_ids(cfg: Config, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the ids of the tokens that end a response: of the tokenizer first, then of the model's files."""
    return loading.stop_ids(tokenizer, [cfg.start] if cfg.start else [])


def declared_tokens(cfg: Config, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the texts of the tokens that end a response besides the end token of the tokenizer.

    The ids that a model declares are those of its own tokenizer; for the tokenizer of a judge there are none.
    """
    if tokenizer.name_or_path != (cfg.model.tokenizer or cfg.start):
        return []
    texts = [str(tokenizer.decode([number])) for number in build_stop_ids(cfg, tokenizer)[1:]]
    return [text for text in texts if text.strip()]


def say_ends(cfg: Config, tokenizer: PreTrainedTokenizerFast) -> None:
    """Print the tokens that end a response, if there are several, and the declared ids that no token has."""
    if cfg.algo.trains is Trains.reward:
        return
    ends = build_stop_ids(cfg, tokenizer)
    if len(ends) > 1:
        say_row("responses end with", names_of(ends, tokenizer))
    if cfg.start and (
        unknown := sorted(loading.declared_ends([cfg.start]) - set(tokenizer.get_vocab().values()))
    ):
        log.warning(
            f"end tokens that {cfg.start} declares are not used, because no token of the tokenizer has these "
            f"ids: {', '.join(map(str, unknown))}"
        )


def names_of(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the tokens with these ids as a list for a reader, such as `<|im_end|>, <|endoftext|>`."""
    return ", ".join(map(str, tokenizer.convert_ids_to_tokens(ids)))


# Choice of the device of a run.


def build_device(cfg: Config) -> torch.device:
    """Return the device of the models, without an index, and let this process compute as `cfg.backend` asks.

    Raises:
        UserError: the config asks for a GPU and torch finds none, for float16 without a GPU, or for
            `backend.portable` where this is not possible.
    """
    _set_portable(cfg.backend.portable)
    name = cfg.backend.device.value
    if cfg.backend.device is Device.auto:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "backend.device=cuda needs a GPU that torch can use, and torch finds none; "
            "set backend.device=auto"
        )
    if name == "cpu" and cfg.model.dtype is Dtype.float16:
        raise UserError(
            "model.dtype must be float32 or bfloat16 without a GPU (torch finds none; CPUs do not train in "
            "float16), got float16; set model.dtype=bfloat16"
        )
    return torch.device(name)


# Setting of a process that computes the same bits as those on other x86 processors (`backend.portable`).


def _set_portable(wanted: bool) -> None:
    """Let this process and its child processes compute the bits of every processor, or of their own.

    Call this function before torch computes in this process.

    Raises:
        UserError: this is not possible here.
    """
    if asked_portable() and not wanted:
        raise UserError(
            "backend.portable must be true in this process (an earlier run or the environment made it so), "
            f"got false; start another process, without the variables {', '.join(PORTABLE)}"
        )
    if wanted:
        os.environ.update(PORTABLE)
        if not _computes_portably():
            for name in PORTABLE:
                del os.environ[name]
            raise UserError(
                "backend.portable=true needs an x86 processor with AVX2, torch with MKL, and a process in "
                "which torch has not computed before; start another process, or set backend.portable=false"
            )


def _computes_portably() -> bool:
    """Return whether torch uses AVX2, and MKL its compatible branch.

    This branch rounds each product before it is added. With AVX2, the other branches do not: they fuse both.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX2" or not torch.backends.mkl.is_available():
        return False
    a = 1 + 2.0**-12
    left, right = a * torch.eye(64), a * torch.eye(64)
    left[:, 0], right[0] = -1 - 2.0**-11, 1
    return not (left @ right).diagonal()[1:].any().item()  # a * a - (1 + 2^-11): 0 if rounded, 2^-24 if fused


# The limits of forward passes of a run, from its config and its memory plan.


def training_budget(cfg: Config) -> Budget:
    """Return the limits of a forward pass with gradients."""
    backend = with_token_limit(cfg).backend
    return Budget(backend.micro_batch, backend.tokens)


def inference_budget(cfg: Config) -> Budget:
    """Return the limits of a forward pass without gradients, which needs less memory per token."""
    limit = training_budget(cfg)
    if limit.tokens is None:
        return limit
    return Budget(WITHOUT_GRADIENT * limit.sequences, WITHOUT_GRADIENT * limit.tokens)


# Output of libraries and of ranks that the terminal should not show.


def quieten_libraries() -> None:
    """Turn off progress bars and warnings of libraries.

    The warnings of libraries during loading are not needed, because this project checks loaded models and
    data.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()


def joined(cfg: Config, ranks: Ranks | None = None) -> Ranks:
    """Return the ranks of a command, by default those that the launcher started.

    Progress bars and warnings of libraries, and all output of ranks other than 0, are turned off.
    """
    ranks = ranks or Ranks.join(build_device(cfg), cfg.backend.timeout_s)
    console.quiet = not ranks.first
    # transformers imports DeepSpeed to save a model; without this variable DeepSpeed prints what it detects.
    os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)
    quieten_libraries()
    return ranks


# The error of a run whose GPU has too little memory: for what, and which settings need less.


_SCORES = "scores"  # of scorers that are models; the other phases are those of the memory plan
_PHASES = {  # beginning of the name of a module -> phase; the first that is in a traceback counts
    "rlhf.scorers": _SCORES,
    "rlhf.models.forward": "log-probs and scores",
    "rlhf.generators": "sampling",
    "rlhf.engines": "training",
}


def full_gpu(cfg: Config, folder: RunFolder | None, error: Exception) -> RunError | None:
    """Explain that a GPU of this process, or of another process of the run, has too little memory.

    The message has settings that need less memory, and the last checkpoint.

    Args:
        cfg: the config of the run.
        folder: the folder of the run; None: nothing is trained, so there is no checkpoint to resume from.
        error: any error.
    """
    if isinstance(error, torch.OutOfMemoryError):
        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        found = (phase for start, phase in _PHASES.items() if any(name.startswith(start) for name in modules))
        phase = next(found, "the models")
        said = f"a GPU has too little memory for {phase} ({first_line(error)})"
    elif isinstance(error, OutOfMemory):
        phase = "sampling" if error.process == "generator" else "log-probs and scores"
        said = str(error)
    else:
        return None
    keys = ["scorer.batch_size", "gold.batch_size"] if phase == _SCORES else [adjustable(cfg, phase)]
    tokens = training_budget(cfg).tokens
    halves = {key: halved(cfg, key, cfg.algo.samples_per_prompt) for key in keys if key is not None}
    if keys == ["backend.micro_batch"] and tokens is not None:
        halves = {"backend.tokens": tokens // 2}
    useless = set() if phase == "training" else {"model.gradient_checkpointing=true"}
    if folder is None:
        useless.add("model.lora.rank=16")
    settings = [*(f"{key}={half}" for key, half in halves.items() if half), *smaller_settings(cfg)]
    settings = [each for each in settings if each not in useless]
    text = f"set {', or '.join(settings)}" if settings else "choose a smaller model"
    if folder is not None and (last := folder.last_checkpoint()) is not None:
        same = [each for each in settings if each.partition("=")[0] in not_in_name()]  # the same run folder
        text += f"; the last checkpoint is {last}"
        text += f", from which the same command resumes with {' or '.join(same)}" if same else ""
    elif folder is not None:
        text += "; no checkpoint was written yet"
    return RunError(f"{said}; {text}")
