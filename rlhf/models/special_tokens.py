"""Rules for the pad token of a tokenizer, and proposals of a pad token. This module imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection

# Tokens that models reserve for padding or never produce, best first.
PAD_TOKENS = (
    "<|padding|>",
    "<|finetune_right_pad_id|>",
    "<pad>",
    "[PAD]",
    "<|pad|>",
    "<|pad_token|>",
    "<|PAD_TOKEN|>",
    "<|dummy_0|>",
)
LOOKS_SPECIAL = re.compile(r"<(?!0x)[^<>\s]+>|\[[A-Z]+\]")
RESERVED = re.compile(r"<\|reserved_special_token_\d+\|>|<\|reserved_\d+\|>|<unused\d+>|<\|extra_\d+\|>")


def pad_problem(
    key: str, wanted: str | None, path: str, vocabulary: Collection[str], pad: str | None, end: str | None
) -> str | None:
    """Return the error message for the pad token of a tokenizer, or None.

    Args:
        key: config key of the pad token.
        wanted: value of `key`; None: the tokenizer's own pad token is used.
        path: hub name or folder of the tokenizer, for the message.
        vocabulary: tokens of the tokenizer.
        pad: pad token of the tokenizer itself.
        end: end token of the tokenizer.
    """
    if wanted is not None and wanted not in vocabulary:
        return (
            f"{key} must be in the vocabulary of the tokenizer of {path!r} (a new token would have no "
            f"embedding), got {wanted!r}; {pad_remedy(key, vocabulary, end)}"
        )
    used = pad if wanted is None else wanted
    if used is None or used == end:
        return (
            f"{key} must be set for the tokenizer of {path!r} (the pad token must differ from the end token, "
            f"which is trained on), got pad token {used!r} and end token {end!r}; "
            f"{pad_remedy(key, vocabulary, end)}"
        )
    return None


def pad_remedy(key: str, vocabulary: Collection[str], end: str | None) -> str:
    """Return the remedy for a missing pad token: an assignment to paste, if a token is obviously unused."""
    token = unused_token(vocabulary, end)
    if token is None:
        special = sorted(each for each in filter(LOOKS_SPECIAL.fullmatch, vocabulary) if each != end)
        unused = f"set {key} to a token of the vocabulary that your data do not contain"
        example = f", for example '{key}={special[0]}'" if special else ""
        others = f" (or {', '.join(special[1:4])})" if special[1:] else ""
        return f"{unused}{example}{others}"
    return f"set '{key}=\"{token}\"'"


def unused_token(vocabulary: Collection[str], end: str | None) -> str | None:
    """Return a token of the vocabulary that is reserved for padding or for nothing, or None.

    `<unk>` is the last choice: a tokenizer that has all bytes in its vocabulary never produces it.
    """
    reserved = sorted(filter(RESERVED.fullmatch, vocabulary))
    candidates = (*PAD_TOKENS, *reserved[-1:], "<unk>")
    return next((token for token in candidates if token in vocabulary and token != end), None)
