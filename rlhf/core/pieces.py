"""Tokens of a piece of a text, and the text of a piece of tokens: of what follows a prompt.

Many tokenizers treat the start of a text in a special way: those of the Llama 2 kind insert a space, those of
the BERT kind take the first letters for the start of a word. A response is not the start of a text. Here, its
tokens are chosen so that

    decode(prompt tokens + response tokens) == decode(prompt tokens) + response

Control tokens that are quoted in a text (`rlhf.core.control`) are encoded as ordinary text.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from rlhf.core.control import QUOTED, START, unquoted

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
        self.context: _Ids = []  # tokens before a piece that is decoded
        self.before = ""  # their text
        for text in _CONTEXTS:
            ids = self._plain([text])[0]
            if (written := self._text(ids)).endswith(text):  # some tokenizers write a space before each text
                self.context, self.before = ids, written
                break
        self.bare = _without_prefix(tokenizer.backend_tokenizer)
        # Every piece is decoded alone exactly as behind another text, and encoded so, too
        self.simple = self.bare is None and self._keeps(self._plain)
        self.exact = self.simple or (self.bare is not None and self._keeps(self._bare))

    def encode(self, texts: list[str], before: list[str]) -> list[_Ids]:
        """Return the tokens of each text behind the text of `before` at the same place."""
        heads, rests = self.apart(texts)
        found = self._plain(heads)
        for row, (text, prompt) in enumerate(zip(heads, before, strict=True)):
            if text and not self.simple:
                found[row] = (
                    self._exact(text, found[row]) if self.exact else self._best(text, prompt, found[row])
                )
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

    def _exact(self, text: str, ids: _Ids) -> _Ids:
        """Return tokens of a text for a tokenizer that can write every text behind every other text."""
        if self.bare is None or self._text(self.context + ids) == self.before + text:
            return ids
        return self._bare([text])[0]

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
        if whole[: len(start)] == start:
            yield whole[len(start) :]
        for marker in _CONTEXTS:
            first, both = self._plain([marker, marker + text])
            if both[: len(first)] == first:
                yield both[len(first) :]
        if self.bare is not None:
            yield self._bare([text])[0]

    def _tail(self, prompt: str) -> str:
        """Return the end of a prompt: behind its last special token, and from the start of a word on."""
        tail = prompt[-_TAIL:]
        for token in self._specials:
            tail = tail.rpartition(token)[2]
        head, space, rest = tail.partition(" ")
        return rest if space and rest.strip() and len(tail) == _TAIL else tail

    @cached_property
    def _specials(self) -> list[str]:
        return [str(token) for token in self.tokenizer.added_tokens_decoder.values() if str(token)]

    def _plain(self, texts: list[str]) -> list[_Ids]:
        ids: list[_Ids] = self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return ids

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


def _without_prefix(core: Any) -> Any | None:
    """Return a copy of a tokenizer that changes nothing at the start of a text; None: it does not anyway.

    Args:
        core: a `tokenizers.Tokenizer`.
    """
    normalizer, before = _state(core.normalizer), _state(core.pre_tokenizer)
    changed_normalizer, changed_before = _unprefixed(normalizer), _unprefixed(before)
    if changed_normalizer == normalizer and changed_before == before:
        return None
    bare = copy.deepcopy(core)
    for name, state in (("normalizer", changed_normalizer), ("pre_tokenizer", changed_before)):
        if state is not None:
            part = copy.deepcopy(getattr(core, name))
            part.__setstate__(json.dumps(state).encode())
            setattr(bare, name, part)
    return bare


def _state(part: Any | None) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _unprefixed(state: Any) -> Any:
    """Return the state of a normalizer or pre-tokenizer without its changes at the start of a text."""
    if not isinstance(state, dict):
        return state
    changed = dict(state)
    for name in ("normalizers", "pretokenizers"):
        if name in state:
            kept = [each for each in state[name] if each["type"] != "Prepend"]
            changed[name] = [_unprefixed(each) for each in kept]
    if state["type"] == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    if state.get("add_prefix_space"):
        changed["add_prefix_space"] = False
    if state["type"] == "Metaspace":
        changed["prepend_scheme"] = "never"
    if state["type"] == "Strip":
        changed["strip_left"] = False
    return changed


_known: WeakKeyDictionary[PreTrainedTokenizerBase, Pieces] = WeakKeyDictionary()


def pieces(tokenizer: PreTrainedTokenizerBase) -> Pieces:
    """Return the `Pieces` of a tokenizer, which are made once."""
    if tokenizer not in _known:
        _known[tokenizer] = Pieces(tokenizer)
    return _known[tokenizer]
