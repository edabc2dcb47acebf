"""PyTorch modules that run Hugging Face models over rollouts: policy, reward model and value model.

A `Policy` returns log-probs, a `RewardModel` rewards, a `ValueModel` values. Each of these modules wraps a
Hugging Face model in the attribute `model`. The class of the wrapped model does not change, so saving,
sharding and generation work as usual. An `ActorCritic` is a policy and a value model that are trained
together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy as copy_lora
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf.config.models import LoRAConfig
from rlhf.core.batch import Batch, Outputs, Rollouts
from rlhf.core.errors import RunError, UserError
from rlhf.models.divergence import Logits, tiled_divergence
from rlhf.models.folder import first_line, last_names, target_problems
from rlhf.models.forward import CompiledBlocks, encode
from rlhf.models.logprobs import TokenOutputs, fused_logprobs, token_outputs

Compare = Callable[[Logits, Tensor], Tensor]  # the head of a policy, hidden states [R, H] -> divergence [R]

# Names that model configs of transformers use for a factor on the logits.
_LOGIT_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


class LogprobHead(nn.Linear):
    """The output embeddings of a causal LM; with `targets`, they return log-probs instead of logits.

    The head replaces the model's own `nn.Linear` and shares its parameters, so the names in a state dict stay
    the same. Log-probs are computed by calling a module because ZeRO-3 gathers weights when a module is
    called.

    Attributes:
        absent: [V] bool, True for ids that no token has: their logits are -inf. None: every id has a token.
    """

    absent: Tensor | None
    float32 = False  # True: logits are computed in float32, also from 16-bit hidden states and weights
    fused = False  # True: log-probs without extras are computed by `rlhf.models.logprobs`
    compiled = False  # True: log-probs without extras are computed by compiled operations on tiles

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("absent", None, persistent=False)

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        extras: Collection[str] = (),
        compare: Compare | None = None,
    ) -> Tensor | TokenOutputs:
        """Return logits or log-probs.

        Args:
            input: hidden states [..., H]; [R, H] with `targets`.
            targets: token ids [R], or None.
            temperature: divisor of the logits; used only with `targets`.
            extras: names from `rlhf.models.logprobs.EXTRAS`, and "divergence"; used only with `targets`.
            compare: returns the output `divergence` [R], given this head and `input`; None: no such output.

        Returns:
            Without `targets`, logits [..., V]; with `targets`, the log-probs [R] of the targets and the
            outputs in `extras`, float32.
        """
        if targets is not None:
            given = (input, self.weight, self.offset(), targets, temperature)
            if self.fused and not extras and len(targets):
                return TokenOutputs(fused_logprobs(*given))
            own = [name for name in extras if name != "divergence"]
            found = token_outputs(*given, extras=own, float32=self.float32, compiled=self.compiled)
            if compare is None:
                return found
            return found._replace(divergence=compare(lambda rows: self.logits(rows) / temperature, input))
        return self.logits(input)

    def logits(self, input: Tensor) -> Tensor:
        """Return the logits [..., V]; -inf for the ids without a token."""
        if self.float32:
            bias = None if self.bias is None else self.bias.float()
            with torch.autocast(input.device.type, enabled=False):
                logits = nn.functional.linear(input.float(), self.weight.float(), bias)
        else:
            logits = super().forward(input)
        return logits if self.absent is None else logits.masked_fill_(self.absent, -torch.inf)

    def offset(self) -> Tensor | None:
        """Return the bias [V] of log-probs: -inf for the ids without a token, else the bias of the logits."""
        if self.absent is None:
            return self.bias
        bias = self.weight.new_zeros(self.out_features) if self.bias is None else self.bias
        return bias.masked_fill(self.absent, -torch.inf)

    def copied(self) -> LogprobHead:
        """Return a frozen head with a copy of the parameters."""
        head = LogprobHead.of(self, self.float32, self.absent)
        for name, parameter in self.named_parameters():
            setattr(head, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
        return head

    @staticmethod
    def of(linear: nn.Linear, float32: bool = False, absent: Tensor | None = None) -> LogprobHead:
        """Return a head that shares the parameters of `linear`."""
        head = LogprobHead(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        head.weight, head.bias = linear.weight, linear.bias
        head.float32, head.absent = float32, absent
        return head.train(linear.training)


class RolloutModule(nn.Module):
    """A Hugging Face model (attribute `model`) that runs over rollouts.

    Args:
        model: the Hugging Face model.
        shared_prefix: whether each prompt is encoded once for its K responses. The model must allow this:
            see `rlhf.trials.trials`.
    """

    def __init__(self, model: PreTrainedModel, shared_prefix: bool) -> None:
        super().__init__()
        self.model = model
        self.shared_prefix = shared_prefix
        self.always_apart = False  # True: prompts are encoded once even where this does not save time
        self.whole = False  # True: no forward stops early; hooks of ZeRO-3 run at the end of a forward
        self.blocks: Callable[[], AbstractContextManager[None]] = nullcontext  # context of every forward

    def use_compiled(self, wanted: bool) -> None:
        """Compile the blocks and, on a GPU, the operations of the head; or use them as usual again.

        Raises:
            NoBlocks: the model has no blocks that can be compiled.
        """
        self.blocks = CompiledBlocks(self.model).used if wanted else nullcontext
        for head in self.modules():
            if isinstance(head, LogprobHead):
                head.compiled = wanted and head.weight.device.type == "cuda"

    def states(self, batch: Rollouts, last: bool) -> Tensor:
        """Return the hidden states [N, K, T, H], or [N, K, T+1, H] with `last`; see `encode`."""
        with self.blocks():
            return encode(
                backbone(self.model),
                batch.prompt_ids,
                batch.prompt_mask,
                batch.response_ids,
                batch.real,
                self.shared_prefix,
                last,
                self.whole,
                self.always_apart,
            )


class Policy(RolloutModule):
    """A causal LM (attribute `model`) that returns the log-probs of rollouts at a sampling temperature.

    Args:
        model: the causal LM. Its output embeddings are replaced by a `LogprobHead` with the same parameters.
        temperature: divisor of the logits.
        shared_prefix: whether each prompt is encoded once for its K responses.
        float32_head: whether logits are computed in float32, also with a 16-bit dtype.
        tokens: the ids of the tokenizer's tokens; other ids have probability 0. None: every id has a token.

    Raises:
        UserError: the logits of the model are not a linear function of the last hidden state.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        shared_prefix: bool,
        float32_head: bool = False,
        tokens: Collection[int] | None = None,
    ) -> None:
        super().__init__(model, shared_prefix)
        set_head(model, float32_head, tokens)
        self.temperature = temperature
        self.logit_scale = logit_scale(model)
        self.adapters = True  # False: a forward disables the adapters of the model, if any
        self.teacher: Teacher | ServedCandidates | None = None  # what the output `divergence` compares with

    def before_adapters(self) -> Policy:
        """Return a policy that shares this policy's model and runs the model without its adapters."""
        return self._changed(adapters=False)

    def at(self, temperature: float) -> Policy:
        """Return a policy that shares this policy's model and runs at another temperature."""
        return self._changed(temperature=temperature)

    def _changed(self, **attributes: Any) -> Policy:
        """Return a copy with other attributes; `copy.copy` would construct a module of FSDP2."""
        other: Policy = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **attributes)
        return other

    def chosen_adapters(self) -> AbstractContextManager[None]:
        """Return a context in which the model runs with its adapters, or without them (`adapters`)."""
        return nullcontext() if self.adapters else without_adapters(self.model)

    def forward(self, batch: Rollouts, *extras: str) -> Outputs:
        """Return the log-probs [N, K, T] of the responses, 0 at padding and at messages of an environment.

        The output embeddings are applied to the tokens of the model only.

        Args:
            batch: the rollouts.
            extras: names from `rlhf.models.logprobs.EXTRAS`: outputs [N, K, T] that are computed besides the
                log-probs.
        """
        mask = batch.response_mask
        # An index by a mask would wait for the GPU after the model ran, and again in the backward pass.
        real = mask.flatten().nonzero()[:, 0]
        compare = self.teacher.of(batch, real) if self.teacher and "divergence" in extras else None
        with self.chosen_adapters():
            hidden = self.states(batch, last=False)
            head = self.model.get_output_embeddings()
            found: TokenOutputs = head(
                hidden.flatten(0, 2).index_select(0, real),
                targets=batch.response_ids.flatten()[real],
                temperature=self.temperature / self.logit_scale,
                extras=extras,
                compare=compare,
            )
        zeros = torch.zeros(mask.numel(), dtype=found.logprobs.dtype, device=mask.device)
        return Outputs(
            **{
                name: None if x is None else zeros.index_copy(0, real, x).view(mask.shape)
                for name, x in found._asdict().items()
            }
        )


class Teacher:
    """A frozen policy whose next-token distributions another policy is compared with.

    It is no module, so that the module that is trained does not own its weights.

    Args:
        policy: the teacher, or the policy without its adapters.
        beta: which divergence (`rlhf.models.divergence`).
        top: tokens to which the distributions are cut; None: the whole vocabulary.
    """

    def __init__(self, policy: Policy, beta: float, top: int | None) -> None:
        self.policy, self.beta, self.top = policy, beta, top
        head = policy.model.get_output_embeddings()
        # Whole until the end of the backward pass; of a head that is trained whole, the original one.
        self.head: LogprobHead = getattr(head, "original_module", head)

    def of(self, batch: Rollouts, real: Tensor) -> Compare:
        """Return the function that compares the rows `real` of the responses of `batch` with the teacher."""
        policy, rate = self.policy, self.policy.logit_scale / self.policy.temperature

        def logits(rows: Tensor) -> Tensor:  # no call of the module: ranks have different numbers of tiles
            return self.head.logits(rows) * rate

        with torch.no_grad(), policy.chosen_adapters():
            states = policy.states(batch.for_teacher(), last=False).flatten(0, 2).index_select(0, real)
        return lambda student, hidden: tiled_divergence(student, hidden, logits, states, self.beta, self.top)


class ServedCandidates(NamedTuple):
    """In place of a `Teacher`, the most probable tokens that a server sent: the batch has them."""

    beta: float

    def of(self, batch: Rollouts, real: Tensor) -> Compare:
        """Return the function that compares the rows `real` of the responses of `batch` with the teacher."""
        assert isinstance(batch, Batch) and batch.candidates is not None
        ids, theirs = (batch.candidates[name].flatten(0, 2) for name in ("ids", "logprobs"))
        return lambda ours, hidden: tiled_divergence(
            ours, hidden, lambda rows: (ids[rows], theirs[rows]), real, self.beta
        )


def set_head(model: PreTrainedModel, float32: bool, tokens: Collection[int] | None) -> None:
    """Replace the output embeddings of a causal LM by a `LogprobHead`, unless they are one.

    Args:
        model: the causal LM.
        float32: whether logits are computed in float32, also with a 16-bit dtype.
        tokens: the ids of the tokenizer's tokens; None: every id has a token.

    Raises:
        UserError: the output embeddings are not a linear layer.
    """
    head = model.get_output_embeddings()
    if isinstance(head, LogprobHead):
        return
    if type(head) is not nn.Linear:
        raise UserError(
            "model.policy must name a model with a linear output head (log-probs are computed from its "
            f"weight), got {model.config.model_type} with {type(head).__name__}; choose another model"
        )
    absent = None
    if tokens is not None:
        absent = torch.ones(head.out_features, dtype=torch.bool, device=head.weight.device)
        absent[[number for number in tokens if number < len(absent)]] = False
    any_absent = absent is not None and bool(absent.any())
    model.set_output_embeddings(LogprobHead.of(head, float32, absent if any_absent else None))


def token_ids(model: PreTrainedModel) -> Tensor:
    """Return the ids that tokens have, in rising order, on the CPU: all rows of a model without a mask."""
    absent = getattr(model.get_output_embeddings(), "absent", None)
    ids = torch.arange(model.config.get_text_config().vocab_size)
    return ids if absent is None else (~absent).nonzero()[:, 0].cpu()


def absent_ids(model: PreTrainedModel) -> list[int]:
    """Return the ids that no token has and that the head of the model masks; empty without a mask."""
    absent = getattr(model.get_output_embeddings(), "absent", None)
    return [] if absent is None else absent.nonzero()[:, 0].tolist()


def described(error: Exception) -> str:
    """Return the class and the first line of an exception that the code of a model raised."""
    return f"{type(error).__name__}: {first_line(error):.120}"


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without its head."""
    base = model.base_model
    assert isinstance(base, PreTrainedModel)
    return base


def score_head(model: PreTrainedModel) -> nn.Linear:
    """Return the head of a sequence classifier; with adapters, the PEFT module that replaces the head."""
    return cast(nn.Linear, model.get_submodule("score"))


def _read(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Return the output [...] float32 of a reward or value model's head for hidden states [..., H].

    If the config of the model has a `reward_offset`, the offset is subtracted.
    """
    head = score_head(model)
    with torch.autocast(states.device.type, enabled=False):  # float32 is cheap for one number per state
        output = head(states.to(head.weight.dtype))[..., 0].float()
    return output - getattr(model.config, "reward_offset", 0.0)


@torch.no_grad()
def logit_scale(model: PreTrainedModel) -> float:
    """Return the factor between the logits of the model and the output of its head; 1 for most models.

    Models differ in how they change logits (a scale, a soft cap) and in how their configs name the change.
    The factor is therefore measured on two tokens.

    Raises:
        UserError: the forward fails, or the logits are neither the head's output, nor this output multiplied
            or divided by a factor in the config (`_LOGIT_SCALES`).
    """
    ids = torch.tensor([[0, 1]], device=model.device)
    training = model.training
    model.eval()
    try:
        logits = model(input_ids=ids, use_cache=False).logits.float()
        states = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
        raw = model.get_output_embeddings()(states).float()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the code of a model may raise anything
        raise UserError(
            "model.policy must name a model that computes logits from token ids alone, got "
            f"{model.config.model_type}, whose forward fails ({described(error)}); choose another model"
        ) from None
    model.train(training)
    named = [float(v) for v in (getattr(model.config, name, None) for name in _LOGIT_SCALES) if v]
    tolerance = 1e-4 if model.dtype == torch.float32 else 0.05
    largest = float(logits[logits.isfinite()].abs().max())  # -inf: ids without a token
    for scale in (1.0, *named, *(1 / v for v in named)):
        if torch.allclose(logits, raw * scale, rtol=tolerance, atol=tolerance * largest):
            return scale
    raise UserError(
        "model.policy must name a model whose logits are a linear function of its last hidden state "
        f"(log-probs are computed from the head's weight), got {model.config.model_type}, which transforms "
        "the head's output, for example by a soft cap; choose another model"
    )


class RewardModel(RolloutModule):
    """A sequence classifier with one label (attribute `model`) that scores rollouts.

    The reward is read at the last real response token. If the config of the model has a `reward_offset`, the
    offset is subtracted.
    """

    def forward(self, batch: Rollouts) -> Outputs:
        """Return rewards [N, K] float32; the reward of an empty response is read at the last prompt token."""
        hidden = self.states(batch, last=True)
        place = batch.real.sum(-1)  # position t: state after t response tokens
        state = hidden.gather(2, place[:, :, None, None].expand(-1, -1, 1, hidden.shape[-1]))[:, :, 0]
        return Outputs(rewards=_read(self.model, state))


class ValueModel(RolloutModule):
    """A sequence classifier with one label (attribute `model`) that returns the value of every state.

    If the weights come from a reward model, the initial value of a state is the reward of the text up to that
    state.
    """

    def forward(self, batch: Rollouts) -> Outputs:
        """Return values [N, K, T+1] float32, position t after t response tokens; meaningless at padding."""
        return Outputs(values=_read(self.model, self.states(batch, last=True)))


class ActorCritic(nn.Module):
    """A policy and its value model as one module, so that one optimizer or ZeRO engine trains both."""

    def __init__(self, actor: Policy, critic: ValueModel) -> None:
        super().__init__()
        self.actor = actor
        self.critic = critic

    @property
    def model(self) -> PreTrainedModel:
        """Return the Hugging Face model of the policy, which samples and is saved at the end of the run."""
        return self.actor.model

    def forward(self, batch: Rollouts, *extras: str) -> Outputs:
        """Return log-probs [N, K, T], values [N, K, T+1], and the outputs `extras` of the policy."""
        outputs: Outputs = self.actor(batch, *extras)
        return outputs._replace(values=self.critic(batch).values)


# LoRA adapters through PEFT: small trained matrices beside the frozen linear layers of a model.
#
#     y = x W^T + (alpha / rank) (x A^T) B^T      # A [rank, in], B [out, rank]; B = 0 at the start
#
# Source: Hu et al., arXiv 2106.09685. A model with adapters keeps its class and config: PEFT's layers replace
# the model's linear layers, so forwards and generation work unchanged. This module adds adapters, runs a
# model without its adapters, merges adapters into whole weights, and saves and loads adapters.
#
# vLLM 0.32 can serve adapters, but gets merged weights. An adapter has no version: tokens name that of the
# base model, so neither a load nor a token could be confirmed. If an adapter replaces another one during a
# response, keys and values of the earlier tokens stay, so the log-probs of later tokens are those of neither
# adapter (`tests/end_to_end/test_vllm_lora.py`). And an adapter must be a folder, and vLLM refuses heads that
# are trained completely, and ranks outside of its list.


_NAME = "default"  # PEFT's name for the only adapter
_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # prefix of the tensor names in FILE

# PEFT and the 8-bit optimizer import bitsandbytes, which warns on some CPUs that a kernel for quantized
# models is missing; no model of this project is quantized.
logging.getLogger("bitsandbytes.backends").setLevel(logging.ERROR)

_Gather = Callable[[Iterable[Tensor]], AbstractContextManager[Any]]  # returns a context with whole parameters


def adapt(model: PreTrainedModel, config: LoRAConfig, seed: int) -> None:
    """Add float32 adapters to `model` in place, and freeze all weights that are not trained.

    The modules in `config.modules_to_save` are trained whole. The head of a sequence classifier is always
    trained whole, because the head is often new.

    Args:
        model: the model.
        config: rank, alpha, names of the layers with adapters, and names of the modules trained whole.
        seed: seed of the initial adapter weights.

    Raises:
        UserError: a name in `config.targets` or `config.modules_to_save` matches no module, or matches a
            module that cannot have an adapter or be trained whole.
    """
    from peft import LoraConfig, TaskType, inject_adapter_in_model

    classifies = model.get_output_embeddings() is None
    targets = _chosen_targets(model, config.targets)
    whole = _chosen_modules(model, config.modules_to_save, targets)
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        modules_to_save=whole + ["score"] * (classifies and "score" not in whole) or None,
        task_type=TaskType.SEQ_CLS if classifies else TaskType.CAUSAL_LM,
        base_model_name_or_path=model.name_or_path,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model, _NAME)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def is_adapted(model: PreTrainedModel) -> bool:
    """Return True if the model has adapters."""
    return bool(getattr(model, "peft_config", None))


def _chosen_targets(model: PreTrainedModel, names: list[str] | None) -> list[str]:
    """Return the ends of the names of the linear layers that get adapters, sorted.

    Args:
        model: the model.
        names: ends of layer names, as in `model.lora.targets`; None selects all linear layers below the head.

    Raises:
        UserError: a name matches no linear layer below the head.
    """
    below = set(model.base_model.modules())
    linear = [
        name
        for name, module in model.named_modules()
        if module in below and isinstance(module, nn.Linear | Conv1D)
    ]
    if names is None:
        return last_names(linear)
    for problem in target_problems(linear, names):
        raise UserError(problem)
    return sorted(set(names))


def _chosen_modules(model: PreTrainedModel, names: list[str], targets: list[str]) -> list[str]:
    """Return the full names of the modules that are trained whole, without duplicates.

    Args:
        model: the model.
        names: ends of module names, as in `model.lora.modules_to_save`.
        targets: names of the layers that get adapters.

    Raises:
        UserError: a name matches no module, or matches a module that cannot be trained whole.
    """
    chosen: list[str] = []
    tied = [model.get_input_embeddings(), model.get_output_embeddings()]
    for wanted in names:
        matching = {name: m for name, m in model.named_modules() if _matches(name, wanted)}
        if not matching:
            owners = [name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False)]
            raise UserError(
                "model.lora.modules_to_save must name modules of the model "
                f"({', '.join(last_names(owners))}), got {wanted}; set model.lora.modules_to_save=[]"
            )
        for name, module in matching.items():
            inside = [name, *(f"{name}.{child}" for child, _ in module.named_modules() if child)]
            if isinstance(module, nn.ModuleList) or any(_matches(i, t) for i in inside for t in targets):
                raise UserError(
                    "model.lora.modules_to_save must name modules that can be trained whole (no module with "
                    f"adapters, no list of modules), got {wanted}; remove {wanted}, or set "
                    "model.lora.targets to other layers"
                )
            if module in tied and model.config.get_text_config().tie_word_embeddings:
                raise UserError(
                    "model.lora.modules_to_save must not name the embeddings of a model whose input and "
                    f"output embeddings are tied, got {wanted}; remove {wanted}"
                )
        chosen += matching
    return list(dict.fromkeys(chosen))


def _matches(name: str, wanted: str) -> bool:
    """Return True if `wanted` is the module name `name`, or the last dotted parts of `name`."""
    return name == wanted or name.endswith(f".{wanted}")


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Return a context in which `model` runs with its weights from before `adapt`.

    Adapters are disabled, and modules that are trained whole use their original weights.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer | ModulesToSaveWrapper)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def whole_weights(
    model: PreTrainedModel, gather: _Gather = lambda parameters: nullcontext()
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of every weight of `model`, under Hugging Face's names, one tensor at a time.

    The model is not changed. If the model has adapters, weights are float32 and adapters are merged:
    W + (alpha / rank) B A. Otherwise the tensors are yielded unchanged.

    Args:
        model: the model, with or without adapters.
        gather: returns a context in which the given parameters are whole; needed if a backend shards
            parameters.
    """
    adapted = is_adapted(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        before, wrapped, after = name.partition(".base_layer.")
        if wrapped and after == "weight":
            layer: Any = model.get_submodule(before)
            with gather([tensor, layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight]):
                yield f"{before}.weight", tensor.float() + layer.get_delta_weight(_NAME).float()
        elif ".lora_" not in name and ".original_module." not in name:
            plain = name.replace(".base_layer.", ".").replace(f".modules_to_save.{_NAME}.", ".")
            with gather([tensor]):
                whole = tensor.detach()
                yield plain, whole.float() if adapted and whole.is_floating_point() else whole


def adapter_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the trained tensors of a model with adapters (not copies), under PEFT's names."""
    from peft import get_peft_model_state_dict

    tensors = get_peft_model_state_dict(model, adapter_name=_NAME, save_embedding_layers=False)
    return {f"{_PREFIX}{name}": tensor for name, tensor in tensors.items()}


def save_adapter(model: PreTrainedModel, folder: Path, whole: dict[str, Tensor] | None = None) -> None:
    """Write the trained tensors of a model with adapters to `folder`, in PEFT's format.

    Both `load_adapter` and `PeftModel.from_pretrained(base model, folder)` read the folder.

    Args:
        model: the model.
        folder: the folder, which is created if it does not exist.
        whole: the result of `adapter_weights` as whole tensors, if the model is divided over ranks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings: Any = copy_lora(model.peft_config[_NAME])
    settings.inference_mode = True
    settings.target_modules = sorted(settings.target_modules)  # a list, because PEFT keeps a set
    settings.save_pretrained(str(folder))
    weights = (whole or adapter_weights(model)).items()
    tensors = {name: tensor.detach().contiguous() for name, tensor in weights}
    save_file(tensors, folder / _FILE, metadata={"format": "pt"})


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Copy the tensors that `save_adapter` wrote into the adapters of `model`.

    Raises:
        RunError: the tensor names in the file differ from those of the model's adapters.
    """
    saved, own = load_file(folder / _FILE), adapter_weights(model)
    if different := saved.keys() ^ own.keys():
        raise RunError(
            f"{folder / _FILE} must have the tensors of the adapters of this run, got {min(different)} in "
            "only one of the two; set resume=never to start again"
        )
    for name, tensor in own.items():
        tensor.copy_(saved[name])
