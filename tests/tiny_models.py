"""Random models and rollouts small enough for a test."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from rlhf.assembly.parts import make
from rlhf.config.models import Dtype, ModelConfig
from rlhf.config.scorers import ScorerConfig
from rlhf.core.batch import Rollouts
from rlhf.models.forward import cache_argument, place
from rlhf.processes.ranks import ALONE, Ranks
from rlhf.scorers.scorer import Scorer, ScorerContext

VOCABULARY = 97
KINDS = ("gpt_neox", "llama", "qwen2")


def tiny_config(kind: str, **settings) -> PreTrainedConfig:
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,  # large enough that attention matters
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
        **settings,
    }
    if kind != "gpt_neox":
        common["num_key_value_heads"] = 2
    return {"gpt_neox": GPTNeoXConfig, "llama": LlamaConfig, "qwen2": Qwen2Config}[kind](**common)


def tiny_lm(kind: str = "gpt_neox", **settings) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(kind, **settings)).eval()


def tiny_classifier(kind: str = "gpt_neox", **settings) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(tiny_config(kind, num_labels=1, **settings)).eval()


def tiny_rollouts(prompts: int = 4, samples: int = 2, seed: int = 0) -> Rollouts:
    """Return rollouts of unequal length, ids from 2. The first prompt and response have full length."""
    draw = torch.Generator().manual_seed(seed)
    length, tokens = 9, 7
    starts = torch.randint(0, length, (prompts, 1), generator=draw)
    ends = torch.randint(1, tokens + 1, (prompts, samples, 1), generator=draw)
    starts[0], ends[0, 0] = 0, tokens
    prompt_mask, response_mask = torch.arange(length) >= starts, torch.arange(tokens) < ends
    return Rollouts(
        index=torch.arange(prompts),
        texts=[""] * prompts,
        references=[""] * prompts,
        prompt_ids=torch.randint(2, VOCABULARY, (prompts, length), generator=draw) * prompt_mask,
        prompt_mask=prompt_mask,
        response_ids=torch.randint(2, VOCABULARY, (prompts, samples, tokens), generator=draw) * response_mask,
        response_mask=response_mask,
        ended=torch.zeros(prompts, samples, dtype=torch.bool),
    )


def sequences(batch: Rollouts) -> list[list[torch.Tensor]]:
    """Return (prompt token ids, response token ids) without padding, for each prompt and sample."""
    return [
        [
            (batch.prompt_ids[i][batch.prompt_mask[i]], batch.response_ids[i, j][batch.response_mask[i, j]])
            for j in range(batch.response_ids.shape[1])
        ]
        for i in range(len(batch))
    ]


def tiny_tokenizer(words: int = VOCABULARY - 3, **special: str) -> PreTrainedTokenizerFast:
    vocabulary = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(words))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    special = special or {"pad_token": "<pad>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **special)


def scorer_context(
    tokenizer: PreTrainedTokenizerBase,
    at: str = "scorer",
    ranks: Ranks = ALONE,
    dtype: Dtype = Dtype.float32,
    conversational: bool = False,
) -> ScorerContext:
    """Return the context that a run with backend=torch passes to the scorer at the key `at`."""

    def build(section: ScorerConfig, key: str) -> Scorer | None:
        scorer: Scorer | None = make(section, scorer_context(tokenizer, key, ranks, dtype, conversational))
        return scorer

    return ScorerContext(
        at=at,
        tokenizer=tokenizer,
        ranks=ranks,
        model=ModelConfig(name="tiny", dtype=dtype),
        place=lambda load: place(load(), ranks.device),
        build=build,
        conversational=conversational,
    )


def cache_of(outputs: ModelOutput) -> Cache:
    """Return the keys and values of a forward; their name depends on the version of transformers."""
    return outputs["cache" if "cache" in outputs else "past_key_values"]


@torch.no_grad()
def logprobs_in_flight(
    before: PreTrainedModel, after: PreTrainedModel, batch: Rollouts, swap: int, temperature: float
) -> torch.Tensor:
    """Return log-probs [N, K, T] if `after` replaces `before` at token `swap` but keeps its cache."""
    found = torch.zeros(batch.response_ids.shape)
    for i, group in enumerate(sequences(batch)):
        for j, (prompt, response) in enumerate(group):
            whole = torch.cat([prompt, response])[None]
            seen = len(prompt) + swap - 1  # the token before `swap` is the first that `after` reads
            out = before(whole[:, :seen], use_cache=True)
            logits = out.logits
            if len(response) >= swap:
                given = cache_argument(after, cache_of(out))
                logits = torch.cat([logits, after(whole[:, seen:], **given).logits], 1)
            logp = torch.log_softmax(logits[0, len(prompt) - 1 : -1] / temperature, -1)
            found[i, j, : len(response)] = logp.gather(-1, response[:, None])[:, 0]
    return found
