"""Sections of the models (hub models, the embedded model, LoRA) and of the backends that train them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import MISSING, OmegaConf

from rlhf.config.schema import Affects, Choice, Section, data_file, entry, missing_package, number, option
from rlhf.text.chat import PLAIN

# Sections of the models: hub models, the embedded model, LoRA.


AUTO = "auto"  # value of model.attention


class Dtype(Choice):
    """The dtype in which a model computes."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass(kw_only=True, slots=True)
class LoRAConfig(Section):
    """Low-rank adapters, trained instead of the weights (Hu et al., arXiv 2106.09685)."""

    rank: int = number(0, "rank of the adapters; 0: no adapters", least=0, remedy="16")
    alpha: int = number(32, "the update is multiplied by alpha / rank", "rank!=0", least=1)
    targets: list[str] | None = entry(None, when="rank!=0")
    """names of linear layers, or ends of such names; null: all linear layers except the head"""
    modules_to_save: list[str] = entry(list, when="rank!=0")
    """names of modules, or ends of such names, that are trained whole, without adapters"""

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if PEFT is missing."""
        if self.rank > 0:
            yield from missing_package(f"{at}.rank={self.rank}", "peft", "lora", "PEFT", f"set {at}.rank=0")


@dataclass(kw_only=True, slots=True)
class MovingConfig(Section):
    """A reference that follows the policy, or a policy that is reset to its moving average."""

    every: int | None = number(None, least=1, remedy="512", added=True)
    """updates between two moves of the reference (or two resets); null: the reference is frozen"""
    share: float = number(0.6, when=("every!=null", "decay=null"), least=0, most=1, added=True)
    """share of the policy in the new reference; the rest is the reference before"""
    decay: float | None = number(None, when="every!=null", least=0, below=1, remedy="0.995", added=True)
    """Elastic Reset: decay of a moving average of the policy, to which the policy is reset, while the average
    becomes the reference; null: the reference moves"""


@option("model", "hub")
class ModelConfig(Section):
    """The models of a run, each a hub name or a local folder."""

    name: str = MISSING
    base: str | None = entry(None, "the model that SFT starts from")
    policy: str | None = entry(None)
    """initial model of RL and reward modelling; null: made by SFT (embedded tasks)"""
    reference: str | None = entry(None)
    """frozen reference of the KL penalty and metrics; null: the initial policy"""
    reward: Any = entry(None)
    """the model of scorer=reward_model, or a list of these (an ensemble); null: made by algo=reward
    (embedded tasks)"""
    tokenizer: str | None = entry(None, "null: the tokenizer of the policy (of the base model, for sft)")
    pad_token: str | None = entry(None)
    """null: the tokenizer's own pad token, or a token that no text contains"""
    chat_template: str | None = entry(None, added=True)
    """file with a Jinja template, or plain; null: of the tokenizer"""
    thinking: bool | None = entry(None, added=True)
    """whether replies begin with thoughts, for chat templates with such a choice, as of Qwen 3; null: as the
    template does without a choice"""
    clock: str | None = entry(None, added=True)
    """time that the chat template reads, 2026-01-31T09:00; null: start of the run"""
    dtype: Dtype = entry(Dtype.float32)
    """dtype of forward passes; trained weights are always float32; `float16`: with loss scaling, so that
    small gradients do not become 0; GPUs only"""
    float32_head: bool = entry(False, added=True)
    """logits in float32 with a 16-bit dtype, in the trainer and in its generators"""
    fused_head: bool | None = entry(None, added=True)
    """log-probs by Liger's kernel; null: only on a GPU where it is faster"""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    moving: MovingConfig = field(default_factory=MovingConfig)
    gradient_checkpointing: bool = entry(False, affects=Affects.speed)
    """store only the inputs of blocks; recompute the rest in backward"""
    shared_prefix: bool = entry(True, "encode a prompt once for its K responses")
    attention: str = entry("sdpa")
    """attention implementation of transformers; auto: flash attention if installed"""
    trust_remote_code: bool = entry(False, "run Python code that comes with a hub model")

    # of models without such a key
    context: ClassVar[int | None] = None  # length of a model with random weights; None: none is made

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if the reward model, the file of the chat template or the clock is none."""
        yield from path_problems(self, at, "reward")
        try:
            datetime.fromisoformat(self.clock or "2026-01-31")
        except ValueError:
            rule, now = "be a time in ISO format", "2026-01-31T09:00"
            yield self.refused(at, "clock", rule, "the chat template reads it", now)
        if self.chat_template in (None, PLAIN):
            return
        file = Path(self.chat_template).expanduser()
        if not file.is_file():
            remedy = f"set {at}.chat_template=plain (a line such as <|user|> before each message)"
            rule = "be a file with a Jinja template or plain"
            yield self.refused(at, "chat_template", rule, "there is no such file", remedy=remedy)
        elif (reason := _syntax_error(file)) is not None:
            remedy = "correct the file"
            yield self.refused(at, "chat_template", "be a valid Jinja template", reason, remedy=remedy)

    @property
    def loaded_attention(self) -> str:
        """The attention implementation with which models are loaded; `auto` may change it afterwards."""
        return "sdpa" if self.attention == AUTO else self.attention

    @property
    def starts_as_reference(self) -> bool:
        """Whether the reference is the initial policy."""
        return self.reference in (None, self.policy)

    def architecture(self, vocabulary: int) -> dict[str, Any]:
        """Return the config.json of the model with random weights that a run makes; empty: it makes none."""
        return {}


class Combine(Choice):
    """How the scores of the reward models of an ensemble become one score."""

    mean = "mean", "their mean"
    worst = "worst", "the lowest"
    uncertainty = "uncertainty", "their mean minus doubt times their standard deviation"
    weights = "weights", "that of one model whose weights are the mean of the models'"


def paths_in(value: Any) -> list[str]:
    """Return the hub names and folders in the value of a key that takes one, a list of them, or null."""
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]


def path_problems(section: Section, at: str, name: str) -> Iterator[str]:
    """Yield an error if a key that takes a hub name or folder, a list of them, or null has another value."""
    found, value = paths_in(getattr(section, name)), getattr(section, name)
    if value is not None and len(found) < (max(1, len(value)) if isinstance(value, list) else 1):
        rule, example = "be a hub name or folder, or a list of these", "<hub name or folder>"
        yield section.refused(at, name, rule, "it is a reward model", example)


def _syntax_error(file: Path) -> str | None:
    """Return the line and the reason of the syntax error in a Jinja template; None if there is none."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(file.read_text(encoding="utf-8"))
    except TemplateSyntaxError as error:
        if "generation" in str(error.message):  # a tag of transformers
            return None
        return f"line {error.lineno}: {str(error.message).rstrip('.')}"
    except (OSError, ValueError) as error:
        return f"the file cannot be read: {error}"
    return None


@option("model", "nano")
class NanoConfig(ModelConfig):
    """A GPT-NeoX (Pythia) small enough for a laptop's CPU, with random weights if `base` is null."""

    name: str = MISSING
    hidden_size: int = entry(128, "width of the model")
    layers: int = entry(2, "number of blocks")
    heads: int = entry(4, "attention heads per block")
    context: int = entry(512)  # type: ignore[misc]
    """maximum number of tokens of prompt and response together"""

    def architecture(self, vocabulary: int) -> dict[str, Any]:
        """Return the config.json of the model for a tokenizer with `vocabulary` tokens."""
        return {
            "model_type": "gpt_neox",
            "vocab_size": vocabulary,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": 4 * self.hidden_size,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": False,
        }

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if `hidden_size` is not divisible by `heads`."""
        if self.heads < 1 or self.hidden_size % self.heads:
            rule, remedy = f"be divisible by {at}.heads={self.heads}", f"set {at}.heads=4"
            yield self.refused(at, "hidden_size", rule, "each head has an equal part", remedy=remedy)


# Bytes per parameter that training needs, on the device and in RAM; each backend states its own footprint.
#
# AdamW stores two moments per parameter, 8 bytes in float32. DeepSpeed's ZeRO (Rajbhandari et al., arXiv
# 1910.02054) shards optimizer states (stage 1), gradients (stage 2) and weights (stage 3) over the ranks, and
# offloads to RAM (Ren et al., arXiv 2101.06840). DeepSpeed's functions
# `estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs` give the same numbers
# for bfloat16.


KINDS = ("weights", "gradients", "optimizer")
_MESSAGE = 25_000_000  # gradients that ranks sum in one message, without ZeRO
_REDUCE_BUCKET = 50_000_000  # the same with ZeRO: DeepSpeed's `reduce_bucket_size`


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes per parameter of each kind of memory: weights, gradients, optimizer (AdamW's states), step.

    If a kind is in `sharded`, the bytes are divided over the ranks; otherwise every rank stores all of them.

    Attributes:
        weights: bytes per parameter of the model.
        gradients: bytes per trained parameter.
        optimizer: bytes of optimizer state per trained parameter.
        step: temporary bytes per trained parameter during the optimizer step on a GPU. Without ZeRO: the
            float32 updates of all tensors at once. With ZeRO stages 1 to 3: float32 gradients,
            divided over the ranks like `optimizer`.
        bucket: largest number of gradients that ranks sum in one message.
        copies: copies of these gradients that exist while they are summed; with ZeRO from stage 1 on, one
            bucket is summed while the backward pass fills another.
        sharded: the kinds (of `KINDS`) that are divided over the ranks.
        offloaded: the kinds (of `KINDS`) that are stored in RAM instead of on the device.
        fsdp: whether weights are gathered as FSDP2 gathers them: the embeddings during the whole pass, and
            with shared prompts every block until the end of the backward pass.
    """

    weights: float = 4
    gradients: float = 4
    optimizer: float = 8
    step: float = 4
    bucket: int = _MESSAGE
    copies: int = 2
    sharded: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    fsdp: bool = False

    @property
    def gathered(self) -> bool:
        """Whether weights are sharded or offloaded, so that each layer is gathered before its use."""
        return "weights" in self.sharded | self.offloaded

    def on_device(self, kind: str, parameters: int, ranks: int) -> float:
        """Return the bytes of `kind` on the device of one rank."""
        return 0 if kind in self.offloaded else self.share(kind, parameters, ranks)

    def in_ram(self, kind: str, parameters: int, ranks: int) -> float:
        """Return the bytes of `kind` that one rank stores in RAM."""
        return self.share(kind, parameters, ranks) if kind in self.offloaded else 0

    def share(self, kind: str, parameters: int, ranks: int) -> float:
        """Return the bytes of `kind` that one of `ranks` ranks stores, on the device or in RAM."""
        each: float = getattr(self, kind)
        return each * parameters / (ranks if kind in self.sharded else 1)


def zero(stage: int, offload: bool, bfloat16: bool) -> Footprint:
    """Return the footprint of DeepSpeed's ZeRO.

    From stage 1 on, the optimizer has a float32 copy of the weights, whatever the dtype of the weights. An
    offloaded optimizer also has float32 gradients.

    Args:
        stage: ZeRO stage, 0 to 3.
        offload: whether the optimizer is offloaded, and at stage 3 the weights as well.
        bfloat16: whether weights and gradients are bfloat16; otherwise float32.
    """
    sharded = {0: (), 1: ("optimizer",), 2: ("gradients", "optimizer"), 3: KINDS}[stage]
    offloaded = {2: ("gradients", "optimizer"), 3: KINDS}.get(stage, ()) if offload else ()
    each = 2 if bfloat16 else 4
    return Footprint(
        weights=each,
        gradients=4 if offloaded else each,
        optimizer=12 if bfloat16 or stage > 0 else 8,
        bucket=_REDUCE_BUCKET if stage > 0 else _MESSAGE,
        sharded=frozenset(sharded),
        offloaded=frozenset(offloaded),
    )


class Device(Choice):
    """The device of the models. `auto`: CUDA if there is a GPU, else the CPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


WITHOUT_GRADIENT = 4  # with `backend.tokens`, how many times as large forward passes without gradients are


@dataclass(kw_only=True, slots=True)
class BackendConfig(Section):
    """The keys that every backend has."""

    scales_loss: ClassVar[bool] = False  # True: the engine scales the loss, as float16 requires
    any_optimizer: ClassVar[bool] = False  # True: the engine has all optimizers; otherwise only AdamW
    compiles: ClassVar[bool] = False  # True: the blocks of models can be compiled
    packages: ClassVar[tuple[str, ...]] = ()  # packages of the library that trains, besides torch
    # keys that stages share
    for_stages: ClassVar[tuple[str, ...]] = ("device", "threads", "portable", "timeout_s")

    name: str = MISSING
    micro_batch: int = number(16, "sequences per forward pass and rank", least=1)
    tokens: int | None = number(
        None,
        "tokens per forward pass and rank (sequences x padded length), besides micro_batch; "
        f"{WITHOUT_GRADIENT} times both without gradients; 0: as many as the memory plan allows; null: 0 on "
        "GPUs, and on CPUs with too little memory for passes without a limit",
        least=0,
        remedy="0",
        added=True,
    )
    device: Device = Device.auto
    threads: int | None = number(None, least=1, affects=Affects.speed)
    """CPU threads of torch; null: one per core"""
    ranks: int | None = number(None, least=1, affects=Affects.speed)
    """number of ranks that the launcher must start; null: any number"""
    compile: bool | None = entry(None, added=True)
    """compile the blocks of models; null: only on a GPU where this saves time"""
    portable: bool = entry(False, added=True)
    """the same bits on every x86 processor with AVX2, at about 1.8 times the CPU time"""
    timeout_s: float = entry(1800.0, affects=Affects.speed)
    """seconds that a rank waits for other ranks before the run fails"""

    def footprint(self) -> Footprint:
        """Return the bytes per parameter that training needs, for the memory plan.

        By default every rank stores all weights, gradients and AdamW moments in float32.
        """
        return Footprint()


@option("backend", "torch", part="rlhf.engines.engine:TorchEngine")
class TorchConfig(BackendConfig):
    """Plain torch: the whole model on every rank."""

    scales_loss: ClassVar[bool] = True
    any_optimizer: ClassVar[bool] = True
    compiles: ClassVar[bool] = True


@option("backend", "fsdp2", part="rlhf.engines.fsdp2_engine:FSDP2Engine")
class FSDP2Config(BackendConfig):
    """FSDP2 of torch: weights, gradients and optimizer state of all models are divided over ranks."""

    def footprint(self) -> Footprint:
        """Return the bytes per parameter that training needs: float32, all divided over ranks."""
        return Footprint(sharded=frozenset(KINDS), bucket=0, fsdp=True)


# -- DeepSpeed -------------------------------------------------------------------------------------

_KEYS = data_file("rlhf.config", "deepspeed.yaml")
OWNED: dict[str, str] = _KEYS["owned"]  # key of DeepSpeed -> key of this project to set instead
KNOWN = frozenset(_KEYS["known"].split())
RANKS_FILE = "ranks.json"  # file in a checkpoint that contains the number of ranks


@dataclass(kw_only=True, slots=True)
class ZeroConfig(BackendConfig):
    """DeepSpeed ZeRO: ranks share optimizer state (from stage 1), gradients (from 2) and weights (3)."""

    packages: ClassVar[tuple[str, ...]] = ("deepspeed",)
    stage: ClassVar[int]
    offload_optimizer: ClassVar[bool] = False  # optimizer state and step on the CPU
    offload_weights: ClassVar[bool] = False  # weights in CPU memory until a forward pass needs them

    for_stages: ClassVar[tuple[str, ...]] = (*BackendConfig.for_stages, "deepspeed")

    deepspeed: dict[str, Any] = entry(dict)
    """native keys of DeepSpeed; they replace the values that this project sets"""

    def footprint(self) -> Footprint:
        """Return the bytes per parameter that training needs: float32, divided over ranks by stage."""
        return zero(self.stage, self.offload_optimizer, bfloat16=False)

    def settings(self, dtype: Dtype, max_grad_norm: float | None = None) -> dict[str, Any]:
        """Return the native configuration of DeepSpeed.

        Args:
            dtype: the dtype of forward passes.
            max_grad_norm: the norm to which DeepSpeed clips gradients; None: no clipping.
        """
        cpu = {"device": "cpu"}
        zero: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": _REDUCE_BUCKET,
            "overlap_comm": self.stage > 0,  # ranks reduce gradients during the backward pass
        }
        if self.offload_optimizer:
            zero["offload_optimizer"] = cpu
        if self.offload_weights:
            zero["offload_param"] = cpu
        ours = {
            "train_micro_batch_size_per_gpu": 1,  # required, but without effect: the engine divides batches
            "gradient_clipping": max_grad_norm or 0.0 if self.stage else 0.0,  # at stage 0 the engine clips
            "zero_optimization": zero,
            # No layers by class: at stage 3 the engine selects the weights that ranks send in bfloat16.
            "torch_autocast": {
                "enabled": dtype is Dtype.bfloat16,
                "dtype": "bfloat16",
                "lower_precision_safe_modules": [],
            },
        }
        both = OmegaConf.to_container(OmegaConf.merge(ours, self.deepspeed))
        assert isinstance(both, dict)
        return {str(key): value for key, value in both.items()}

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if DeepSpeed is missing, and for each native key that is unknown or in `OWNED`."""
        yield from missing_package(
            f"backend={self.name}", "deepspeed", "deepspeed", otherwise="set backend=torch"
        )
        for key in [each for each in self.deepspeed if each not in KNOWN]:
            close = get_close_matches(key, KNOWN, n=1)
            remedy = f"did you mean {close[0]}?" if close else "see DeepSpeed's documentation"
            rule, reason = "be a key of DeepSpeed's configuration", "an unknown key has no effect"
            yield self.refused(at, f"deepspeed.{key}", rule, reason, remedy=remedy)
        for key, instead in OWNED.items():
            if OmegaConf.select(OmegaConf.create(self.deepspeed), key) is not None:
                remedy = "leave it out" if instead == "nothing" else f"set {instead}"
                reason = "another key of the run sets it; results would differ from backend=torch"
                yield self.refused(at, f"deepspeed.{key}", "not be set", reason, remedy=remedy)


@option("backend", "zero0", part="rlhf.engines.deepspeed_engine:DeepSpeedEngine")
class Zero0Config(ZeroConfig):
    """DeepSpeed data parallelism: every rank has the whole model."""

    stage: ClassVar[int] = 0


@option("backend", "zero1", part="rlhf.engines.deepspeed_engine:DeepSpeedEngine")
class Zero1Config(ZeroConfig):
    """DeepSpeed ZeRO stage 1: optimizer state is divided over ranks."""

    stage: ClassVar[int] = 1


@option("backend", "zero2", part="rlhf.engines.deepspeed_engine:DeepSpeedEngine")
class Zero2Config(ZeroConfig):
    """DeepSpeed ZeRO stage 2: optimizer state and gradients are divided over ranks."""

    stage: ClassVar[int] = 2


@option("backend", "zero3", part="rlhf.engines.deepspeed_engine:DeepSpeedEngine")
class Zero3Config(ZeroConfig):
    """ZeRO stage 3: optimizer state, gradients and the weights of all models are divided over ranks."""

    stage: ClassVar[int] = 3


@option("backend", "zero2_offload", part="rlhf.engines.deepspeed_engine:DeepSpeedEngine")
class Zero2OffloadConfig(Zero2Config):
    """ZeRO stage 2 with the optimizer on the CPU."""

    offload_optimizer: ClassVar[bool] = True


@option("backend", "zero3_offload", part="rlhf.engines.deepspeed_engine:DeepSpeedEngine")
class Zero3OffloadConfig(Zero3Config):
    """ZeRO stage 3 with optimizer and weights in CPU memory."""

    offload_optimizer: ClassVar[bool] = True
    offload_weights: ClassVar[bool] = True
