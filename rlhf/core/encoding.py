"""Tokenization of prompts and stored responses.

The policy is trained on the sampled token ids, never on decoded and re-encoded responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.core.batch import Completion, Prompts, Rollouts
from rlhf.core.control import unquoted
from rlhf.core.pieces import pieces


def pad_prompts(ids: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return N token lists as prompt_ids (int64) and prompt_mask (bool), both [N, P], padded on the left."""
    lengths = torch.tensor([len(row) for row in ids])
    width = int(lengths.max())
    prompt_ids = torch.full((len(ids), width), pad_id, dtype=torch.int64)
    for row, tokens in enumerate(ids):
        prompt_ids[row, width - len(tokens) :] = torch.tensor(tokens, dtype=torch.int64)
    return prompt_ids, torch.arange(width)[None, :] >= width - lengths[:, None]


def prompt_tokens(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, formatted: bool = False
) -> list[list[int]]:
    """Return N prompt texts as token ids, without truncation.

    A prompt begins with the tokens that the tokenizer adds at the start of a text, usually a BOS token. These
    tokens are not added if the text itself begins with them. Tokens that the tokenizer adds at the end of a
    text, such as an EOS token, are left out, because a response follows the prompt.

    Args:
        texts: N texts.
        tokenizer: the tokenizer.
        formatted: the texts come from a chat template, which writes all special tokens; nothing is added.
    """
    heads, rests = pieces(tokenizer).apart(texts)
    encoded = tokenizer(heads, add_special_tokens=not formatted, return_special_tokens_mask=not formatted)
    found: list[list[int]] = encoded["input_ids"]
    if not formatted:
        found = list(map(_open_prompt, found, encoded["special_tokens_mask"]))
    return [ids + rest for ids, rest in zip(found, rests, strict=True)]


def _open_prompt(ids: list[int], added: list[int]) -> list[int]:
    """Return a prompt without a second begin and without an end; `added` marks the added tokens with 1."""
    if 0 not in added:  # an empty text
        return ids[:1]
    first, last = added.index(0), len(added) - added[::-1].index(0)
    begin, text = ids[:first], ids[first:last]
    return text if text[:first] == begin else begin + text


def encode_prompts(
    index: Tensor,
    texts: list[str],
    references: list[str],
    tokenizer: PreTrainedTokenizerBase,
    formatted: bool = False,
) -> Prompts:
    """Encode N prompt texts as `prompt_tokens` does."""
    prompt_ids, prompt_mask = pad_prompts(prompt_tokens(texts, tokenizer, formatted), tokenizer.pad_token_id)
    texts = list(map(unquoted, texts))
    return Prompts(
        index=index, texts=texts, references=references, prompt_ids=prompt_ids, prompt_mask=prompt_mask
    )


def encode_completions(
    prompts: Prompts,
    completions: Sequence[Sequence[Completion]],
    tokenizer: PreTrainedTokenizerBase,
    response_length: int | None,
    ended: Tensor | None = None,
) -> Rollouts:
    """Encode K texts for each of N prompts as rollouts; prompt and response together read as both texts.

    Each part of an episode is encoded alone, as an episode is sampled: its replies, each with an end, are the
    response, and its messages are those of an environment.

    Args:
        prompts: N prompts.
        completions: N lists of K texts, or of K episodes.
        tokenizer: the tokenizer of the model that is trained.
        response_length: maximum number of tokens, the EOS token included; None: no limit. A longer text is
            truncated, has no EOS token, and its `ended` is False.
        ended: [N, K] bool; an EOS token is appended to the texts with True. None: an EOS token is appended
            to every text, or reply, that does not end with one of `end_tokens`, such as an answer of a
            dialogue that a template ends with another special token.

    Returns:
        Rollouts with response_ids and response_mask [N, K, T] and ended [N, K]; T is the longest response.
        Of episodes, also with environment_mask.
    """
    count, samples = len(completions), len(completions[0])
    texts = [text for row in completions for text in row]
    assert count == len(prompts) and len(texts) == count * samples, (
        "every prompt must have the same number of texts"
    )
    episodes = [[text] if isinstance(text, str) else text for text in texts]
    ends = torch.ones(count, samples, dtype=torch.bool) if ended is None else ended.cpu()
    before = [prompt for prompt in prompts.texts for _ in range(samples)]
    heads = [[head, *parts[1::2]] for head, parts in zip(before, episodes, strict=True)]
    flat = chain.from_iterable
    replies = iter(pieces(tokenizer).encode([*flat(each[::2] for each in episodes)], [*flat(heads)]))
    messages = iter(message_tokens(tokenizer, [*flat(each[1::2] for each in episodes)]))
    own_ends = set(end_tokens(tokenizer).values())
    encoded: list[list[int]] = []
    sampled: list[list[bool]] = []
    for parts, end in zip(episodes, ends.flatten().tolist(), strict=True):
        ids, own = [], []
        for i in range(len(parts)):
            part = next(messages if i % 2 else replies)
            closed = i % 2 == 0 and (end or i + 1 < len(parts)) and own_ends.isdisjoint(part[-1:])
            ids += part + [tokenizer.eos_token_id] * closed
            own += [i % 2 == 0] * (len(part) + closed)
        encoded.append(ids)
        sampled.append(own)
    limit = max(map(len, encoded)) if response_length is None else response_length
    width = min(limit, max(map(len, encoded)))
    response_ids = torch.full((len(texts), width), tokenizer.pad_token_id, dtype=torch.int64)
    response_mask = torch.zeros(len(texts), width, dtype=torch.bool)
    for row, (ids, own) in enumerate(zip(encoded, sampled, strict=True)):
        response_ids[row, : len(ids)] = torch.tensor(ids[:limit], dtype=torch.int64)
        response_mask[row, : len(ids)] = torch.tensor(own[:limit])
    lengths = torch.tensor([len(ids) for ids in encoded])
    written = (torch.arange(width)[None, :] < lengths[:, None]) & ~response_mask
    return prompts.extend(
        Rollouts,
        response_ids=response_ids.view(count, samples, width),
        response_mask=response_mask.view(count, samples, width),
        environment_mask=None if isinstance(texts[0], str) else written.view(count, samples, width),
        ended=(lengths <= limit).view(count, samples) & ends,
    )


def message_tokens(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Return the tokens of texts that follow the end token of a reply."""
    heads, rests = pieces(tokenizer).apart(texts)
    behind = [f"{tokenizer.eos_token}{text}" for text in heads]  # some tokenizers begin a text with a space
    ids = tokenizer(behind, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    return [row[1:] + rest for row, rest in zip(ids, rests, strict=True)]


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the special tokens that can end a response, with their ids."""
    others = {tokenizer.pad_token, tokenizer.bos_token, tokenizer.unk_token} - {tokenizer.eos_token}
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {token: number for token, number in added.items() if token not in others}
