"""Sections of the models: hub models, the embedded model, LoRA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from rlhf.config.schema import Affects, Choice, Section, entry, missing_package, number, option
from rlhf.text.chat import PLAIN

AUTO = "auto"  # value of model.attention


class Dtype(Choice):
    """The dtype of forward passes. Weights that are trained are always float32."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16", "with loss scaling, so that small gradients do not become 0; GPUs only"


@dataclass(kw_only=True, slots=True)
class LoRAConfig(Section):
    """Low-rank adapters, trained instead of the weights (Hu et al., arXiv 2106.09685)."""

    rank: int = number(0, "rank of the adapters; 0: no adapters", least=0, remedy="16")
    alpha: int = number(32, "the update is multiplied by alpha / rank", "rank!=0")
    targets: list[str] | None = entry(None, when="rank!=0")
    """names of linear layers, or ends of such names; null: all linear layers except the head"""
    modules_to_save: list[str] = entry(list, when="rank!=0")
    """names of modules, or ends of such names, that are trained whole, without adapters"""

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error for each number out of bounds, if PEFT is missing, and if `targets` is empty."""
        if self.rank < 1:
            return
        yield from missing_package(f"{at}.rank={self.rank}", "peft", "lora", "PEFT", f"set {at}.rank=0")
        if self.alpha < 1:
            yield self.refused(at, "alpha", "be >= 1", "the update is multiplied by alpha / rank")
        if self.targets == []:
            yield self.refused(at, "targets", "name a layer", "nothing would be trained")


@option("model", "hub")
class ModelConfig(Section):
    """The models of a run, each a hub name or a local folder."""

    name: str = MISSING
    base: str | None = entry(None, "the model that SFT starts from")
    policy: str | None = entry(None)
    """initial model of RL and reward modelling; null: made by SFT (embedded tasks)"""
    reference: str | None = entry(None)
    """frozen reference of the KL penalty and metrics; null: the initial policy"""
    reward: str | None = entry(None)
    """the model of scorer=reward_model; null: made by algo=reward (embedded tasks)"""
    tokenizer: str | None = entry(None, "null: the tokenizer of the policy (of the base model, for sft)")
    pad_token: str | None = entry(None)
    """null: the tokenizer's own pad token, or a token that no text contains"""
    chat_template: str | None = entry(None, added=True)
    """file with a Jinja template, or plain; null: of the tokenizer"""
    clock: str | None = entry(None, added=True)
    """time that the chat template reads, 2026-01-31T09:00; null: start of the run"""
    dtype: Dtype = entry(Dtype.float32, "dtype of forward passes; trained weights are always float32")
    float32_head: bool = entry(False, added=True)
    """logits in float32 with a 16-bit dtype, in the trainer and in its generators"""
    fused_head: bool | None = entry(None, added=True)
    """log-probs by Liger's kernel; null: only on a GPU where it is faster"""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    gradient_checkpointing: bool = entry(False, affects=Affects.speed)
    """store only the inputs of blocks; recompute the rest in backward"""
    shared_prefix: bool = entry(True, "encode a prompt once for its K responses")
    attention: str = entry("sdpa")
    """attention implementation of transformers; auto: flash attention if installed"""
    trust_remote_code: bool = entry(False, "run Python code that comes with a hub model")

    @property
    def context(self) -> int | None:
        """The context length of a model with random weights; None: this section makes no such model."""
        return None

    def rules(self, at: str) -> Iterator[str]:
        """Yield an error if the chat template is no file with a Jinja template, or the clock is no time."""
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

    def smaller(self) -> dict[str, ModelConfig]:
        """Return settings that need less memory, `key=value` -> the section with the setting."""
        found = {}
        if self.dtype is Dtype.float32:
            found["dtype=bfloat16"] = self.with_({"dtype": Dtype.bfloat16})
        if not self.gradient_checkpointing:
            found["gradient_checkpointing=true"] = self.with_({"gradient_checkpointing": True})
        if not self.lora.rank:
            found["lora.rank=16"] = self.with_({"lora.rank": 16})
        return found


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


def float16_needs_gpu(found: str) -> str:
    """Return the error message for float16 without a GPU; `found` is the reason why there is no GPU."""
    return (
        f"model.dtype must be float32 or bfloat16 without a GPU ({found}; CPUs do not train in float16), got "
        "float16; set model.dtype=bfloat16"
    )


@option("model", "nano")
class NanoConfig(ModelConfig):
    """A GPT-NeoX (Pythia) small enough for a laptop's CPU, with random weights if `base` is null."""

    name: str = MISSING
    hidden_size: int = entry(128, "width of the model")
    layers: int = entry(2, "number of blocks")
    heads: int = entry(4, "attention heads per block")
    context: int = entry(512, "maximum number of tokens of prompt and response together")

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
