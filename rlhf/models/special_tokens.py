"""The rule that chooses a pad token, and error messages about pad tokens. This module imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from rlhf.core.pasting import setting

# Tokens that models reserve for padding, best first.
_PAD_TOKENS = (
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
# Kinds of tokens that no ordinary text contains, best first: padding of a part of the input, such as
# <|fim_pad|>; numbered tokens that stand for nothing, such as <|reserved_special_token_7|>, [control_8] and
# <unused9>; and marks of files of source code.
UNUSED = (
    re.compile(r"(?i)[<\[]\W*(\w+_)?pad(ding)?(_\w+)?\W*[>\]]"),
    re.compile(
        r"(?i)[<\[>]\W*\w*(reserved|unused|not_used|extra|dummy|place\W?holder|control|special)"
        r"[^<>\[\]\d]*\d+\W*[<>\]]"
    ),
    re.compile(r"<(empty_output|gh_stars|repo_?name|file_?sep|filename|(jupyter|issue|commit)_\w+)>"),
)
ENDS = ("generation_config.json", "config.json")  # files of a model that declare its end tokens
UNKNOWN = "<unk>"
_END_OF_TEXT = (
    "<|endoftext|>"  # ends a document in pre-training; chat models often end a turn with another token
)
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}  # the tokens of single bytes in SentencePiece
_BYTE_LEVEL = {
    chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 324))
}  # in byte-level BPE


def choose_pad_token(
    ids: Mapping[str, int], used: Collection[int | str | None], bos: str | None = None, template: str = ""
) -> str | None:
    """Return the pad token of a tokenizer that has none of its own: a token that stands for nothing.

    The choice depends on the arguments only, so a resumed run makes the same choice. No order of `ids` and
    `used` has an influence.

    Args:
        ids: tokens of the vocabulary and their ids.
        used: tokens and token ids that end a response of the model.
        bos: token at the beginning of texts; only `<|endoftext|>` is chosen nevertheless, as the last choice.
        template: the chat template.

    Returns:
        The token. None: the vocabulary has no token that is certainly unused.
    """
    numbered = sorted(ids, key=lambda token: ids[token], reverse=True)
    candidates = [*_PAD_TOKENS]
    for kind in UNUSED:
        candidates += filter(kind.fullmatch, numbered)
    if ids.keys() >= _BYTES or ids.keys() >= _BYTE_LEVEL:  # otherwise <unk> stands for unknown signs of texts
        candidates.append(UNKNOWN)
    candidates = [token for token in candidates if token != bos] + [_END_OF_TEXT]
    return next(
        (t for t in candidates if t in ids and t not in used and ids[t] not in used and t not in template),
        None,
    )


def pad_problem(
    key: str, wanted: str | None, path: str, ids: Mapping[str, int], pad: str | None, end: str | None
) -> str | None:
    """Return the error message for the pad token of a tokenizer, or None.

    Args:
        key: config key of the pad token.
        wanted: value of `key`; None: the tokenizer's own or the chosen pad token is used.
        path: hub name or folder of the tokenizer, for the message.
        ids: tokens of the vocabulary and their ids.
        pad: pad token of the tokenizer itself, or the chosen pad token.
        end: end token of the tokenizer.
    """
    if wanted is not None and wanted not in ids:
        return (
            f"{key} must be in the vocabulary of the tokenizer of {path!r} (a new token would have no "
            f"embedding), got {wanted!r}; {pad_remedy(key, ids, end)}"
        )
    used = pad if wanted is None else wanted
    if used is None or used == end:
        return (
            f"{key} must be set for the tokenizer of {path!r} (the pad token must differ from the end token, "
            f"which is trained on), got pad token {used!r} and end token {end!r}; "
            f"{pad_remedy(key, ids, end)}"
        )
    return None


def pad_remedy(key: str, ids: Mapping[str, int], end: str | None) -> str:
    """Return the remedy for a wrong pad token: an assignment to paste, if a token is certainly unused."""
    token = choose_pad_token(ids, [end])
    if token is None:
        special = sorted(each for each in filter(LOOKS_SPECIAL.fullmatch, ids) if each != end)
        unused = f"set {key} to a token of the vocabulary that your data do not contain"
        example = f", for example {setting(key, special[0])}" if special else ""
        others = f" (or {', '.join(special[1:4])})" if special[1:] else ""
        return f"{unused}{example}{others}"
    return f"set {setting(key, token)}"


def end_ids(*files: Path | str | None) -> Iterator[int]:
    """Yield the ids of the end tokens that files of a model declare (generation_config.json, config.json).

    The section of the text model of a config counts, too. Files that are missing or damaged are skipped.
    """
    for file in files:
        try:
            content = json.loads(Path(file or "").read_text(encoding="utf-8"))
            found = [part.get("eos_token_id") for part in (content, content.get("text_config") or {})]
        except (OSError, ValueError, AttributeError):
            continue
        for stated in found:
            yield from stated if isinstance(stated, list) else [] if stated is None else [stated]
