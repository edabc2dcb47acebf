"""Text as tokens: prompts, stored responses, and pieces of a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.core.batch import Completion, Prompts, Rollouts
from rlhf.text.chat import QUOTED, START, end_tokens, unquoted

# Tokenization of prompts and stored responses.
#
# The policy is trained on the sampled token ids, never on decoded and re-encoded responses.


def pad_prompts(ids: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return N token lists as prompt_ids (int64) and prompt_mask (bool), both [N, P], padded on the left."""
    lengths = torch.tensor([len(row) for row in ids])
    width = int(lengths.max())
    rows = [[*[pad_id] * (width - len(row)), *row] for row in ids]
    return torch.tensor(rows, dtype=torch.int64), torch.arange(width) >= width - lengths[:, None]


def padded(rows: Sequence[Sequence[Any]], width: int, fill: float, dtype: torch.dtype) -> Tensor:
    """Return rows of at most `width` numbers as a tensor [R, width], padded on the right with `fill`."""
    table = torch.full((len(rows), width), fill, dtype=dtype)
    for place, row in zip(table, rows, strict=True):
        place[: len(row)] = torch.tensor(row, dtype=dtype)
    return table


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
    count, samples = len(prompts), len(completions[0])
    texts = [text for row in completions for text in row]
    assert len(texts) == count * samples, "every prompt must have the same number of texts"
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
    response_ids = padded([ids[:limit] for ids in encoded], width, tokenizer.pad_token_id, torch.int64)
    response_mask = padded([own[:limit] for own in sampled], width, False, torch.bool)
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


# Tokens of a piece of a text, and the text of a piece of tokens: of what follows a prompt.
#
# Many tokenizers treat the start of a text in a special way: those of the Llama 2 kind insert a space, those
# of the BERT kind take the first letters for the start of a word. A response is not the start of a text.
# Here, its tokens are chosen so that
#
#     decode(prompt tokens + response tokens) == decode(prompt tokens) + response
#
# Control tokens that are quoted in a text (`rlhf.text.chat`) are encoded as ordinary text.


_Ids = list[int]

_CONTEXTS = ("a", "x", "1", ".", "\n")  # texts that can stand before a piece
_PROBES = ("b", " b", "  b", "b c", "\nb", "\n\n b", ".", "1", "é", "", " ")
_TAIL = 32  # characters of a prompt whose tokens can influence the first token of a response


class Pieces:
    """A tokenizer for pieces of texts.

    Args:
        tokenizer: a fast tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        written = ((ids, self._text(ids)) for ids in self._plain(list(_CONTEXTS)))
        # Some tokenizers write a space before each text
        usable = (each for each, text in zip(written, _CONTEXTS, strict=True) if each[1].endswith(text))
        self.context, self.before = next(usable, (_Ids(), ""))  # tokens before a decoded piece; their text
        self.specials = [str(each) for each in tokenizer.added_tokens_decoder.values() if str(each)]
        self.bare = _without_prefix(tokenizer.backend_tokenizer)
        # Every piece is decoded alone exactly as behind another text, and encoded so, too
        self.simple = self.bare is None and self._keeps(self._plain)
        self.exact = self.simple or (self.bare is not None and self._keeps(self._bare))

    def encode(self, texts: list[str], before: list[str]) -> list[_Ids]:
        """Return the tokens of each text behind the text of `before` at the same place."""
        heads, rests = self.apart(texts)
        found = self._plain(heads)
        for row, (text, prompt) in enumerate(zip(heads, before, strict=True)):
            if text and not self.exact:
                found[row] = self._best(text, prompt, found[row])
            elif text and self.bare is not None and self.read(found[row]) != text:
                found[row] = self._bare([text])[0]
        return [ids + rest for ids, rest in zip(found, rests, strict=True)]

    def apart(self, texts: list[str]) -> tuple[list[str], list[_Ids]]:
        """Return each text up to its first quoted control token, and the tokens of the rest of the text."""
        heads, rests = list(texts), [_Ids() for _ in texts]
        behind = self._plain if self.bare is None else self._bare
        for row, text in enumerate(texts):
            if START in text:
                heads[row], *parts = QUOTED.split(text)
                for number, part in enumerate(parts):
                    rests[row] += behind([part])[0] if number % 2 else self._letters(unquoted(part))
        return heads, rests

    def _letters(self, token: str) -> _Ids:
        """Return the tokens of each letter of a control token, which no vocabulary joins."""
        core = self.bare or self.tokenizer.backend_tokenizer
        parts = [core.normalizer.normalize_str(letter) if core.normalizer else letter for letter in token]
        if core.pre_tokenizer is not None:
            parts = [part for each in parts for part, _ in core.pre_tokenizer.pre_tokenize_str(each)]
        return [each.id for part in parts for each in core.model.tokenize(part)]

    def decode(self, ids: list[_Ids]) -> list[str]:
        """Return the text that each list of tokens adds to a text before it, without special tokens."""
        whole = self.tokenizer.batch_decode(
            [self.context + row for row in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return [text.removeprefix(self.before) for text in whole]

    def read(self, ids: _Ids) -> str:
        """Return the text that tokens add to a text before them, special tokens included."""
        return self._text(self.context + ids).removeprefix(self.before)

    def _best(self, text: str, prompt: str, ids: _Ids) -> _Ids:
        """Return tokens of a text that read behind the prompt as in the tokens of both; else `ids`."""
        tail = self._tail(prompt)
        start, whole = self._plain([tail, tail + text])
        wanted = self._text(whole)
        for each in self._candidates(text, ids, start, whole):
            if self._text(start + each) == wanted:
                return each
        return ids

    def _candidates(self, text: str, ids: _Ids, start: _Ids, whole: _Ids) -> Iterator[_Ids]:
        yield ids
        others = (self._plain([marker, marker + text]) for marker in _CONTEXTS)
        for first, both in chain([[start, whole]], others):
            if both[: len(first)] == first:
                yield both[len(first) :]
        if self.bare is not None:
            yield self._bare([text])[0]

    def _tail(self, prompt: str) -> str:
        """Return the end of a prompt: behind its last special token, and from the start of a word on."""
        tail = prompt[-_TAIL:]
        for token in self.specials:
            tail = tail.rpartition(token)[2]
        head, space, rest = tail.partition(" ")
        return rest if space and rest.strip() and len(tail) == _TAIL else tail

    def _plain(self, texts: list[str]) -> list[_Ids]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    def _bare(self, texts: list[str]) -> list[_Ids]:
        assert self.bare is not None
        return [each.ids for each in self.bare.encode_batch(texts, add_special_tokens=False)]

    def _text(self, ids: _Ids) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _keeps(self, encode: Callable[[list[str]], list[_Ids]]) -> bool:
        """Return whether `encode` writes each probe behind another text without a change."""
        return bool(self.context) and all(
            self._text(self.context + ids) == self.before + text
            for text, ids in zip(_PROBES, encode(list(_PROBES)), strict=True)
        )


def _without_prefix(core: Tokenizer) -> Tokenizer | None:
    """Return a copy of a tokenizer that changes nothing at the start of a text; None: it does not anyway."""
    parts = {"normalizer": core.normalizer, "pre_tokenizer": core.pre_tokenizer}
    states = {name: json.loads(part.__getstate__()) for name, part in parts.items() if part is not None}
    changed = {name: _unprefixed(state) for name, state in states.items()}
    if changed == states:
        return None
    return Tokenizer.from_str(json.dumps(json.loads(core.to_str()) | changed))


# Type of a normalizer or pre-tokenizer -> its settings without changes at the start of a text
_UNPREFIXED: dict[str, Any] = {"Metaspace": {"prepend_scheme": "never"}, "Strip": {"strip_left": False}}


def _unprefixed(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a normalizer or pre-tokenizer without its changes at the start of a text."""
    if state["type"] == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    changed = state | _UNPREFIXED.get(state["type"], {})
    for name in ("normalizers", "pretokenizers"):
        if name in state:
            changed[name] = list(map(_unprefixed, state[name]))
    if state.get("add_prefix_space"):
        changed["add_prefix_space"] = False
    return changed


_known: WeakKeyDictionary[PreTrainedTokenizerBase, Pieces] = WeakKeyDictionary()


def pieces(tokenizer: PreTrainedTokenizerBase) -> Pieces:
    """Return the `Pieces` of a tokenizer, which are made once."""
    if tokenizer not in _known:
        _known[tokenizer] = Pieces(tokenizer)
    return _known[tokenizer]
