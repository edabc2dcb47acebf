"""Control tokens, which the chat template writes, and texts of the data, which must not become such tokens.

A text may contain the letters of a control token, such as `<|im_end|>`: a user quotes it, or a policy writes
it, for which it is ordinary text. `quoted` marks these letters with two noncharacters of Unicode before a
template formats the text. `rlhf.core.pieces` encodes marked letters as ordinary text, so no turn ends there.
This module imports no torch and no transformers.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlhf.core.chat_format import ANSWERS, QUESTION, formatted
from rlhf.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

START, END = "\ufdd0", "\ufdd1"  # behind the first letter of a quoted token, and behind its last letter
QUOTED = re.compile(f"(.{START}[^{END}]*{END})", re.DOTALL)
ROLE_MARK = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")  # the form of marks of turns, such as <|user|> or [INST]
_END_TAG = re.compile(r"</(\w\w+)>")  # of a part of a message, such as </think>; </s> is none
_EMPTY = re.compile(r"<([^<>/\s]+)>\s*</\1>")  # tags without content, such as thoughts of a plain answer


def control_tokens(
    tokenizer: PreTrainedTokenizerBase, besides: PreTrainedTokenizerBase | None = None
) -> re.Pattern[str]:
    """Return a pattern that matches the control tokens of a tokenizer in a text.

    Control tokens are the special tokens, and other tokens with which the chat template marks turns. Tags
    that mark a part of a message, such as `<think>` and `</think>`, are none, special or not.

    Args:
        tokenizer: the tokenizer.
        besides: a tokenizer whose tokens are left out; None: no token is left out.
    """
    turns, text = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWERS[0]}], ""
    with suppress(UserError):  # there is no template, or it refuses an answer
        text = formatted(tokenizer, turns, "a question with its answer")
    marks = {*ROLE_MARK.findall(_EMPTY.sub("", text)), *map(str, tokenizer.special_tokens_map.values())}
    added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
    tags = {f"<{slash}{tag[1]}>" for tag in map(_END_TAG.fullmatch, added) if tag for slash in ("", "/")}
    found = marks & {*added} | {token for token in added if added[token]} - (tags - marks)
    found -= {str(token) for token in besides.added_tokens_decoder.values()} if besides else set()
    found = {token for token in found if token.strip()}
    return re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True))) or "(?!)")


def quoted(value: Any, control: re.Pattern[str]) -> Any:
    """Return a text, or messages or tools with all their texts, in which control tokens are marked."""
    if isinstance(value, str):
        return control.sub(lambda found: f"{found[0][0]}{START}{found[0][1:]}{END}", value)
    if isinstance(value, dict):
        return {quoted(key, control): quoted(each, control) for key, each in value.items()}
    return [quoted(each, control) for each in value] if isinstance(value, list | tuple) else value


def unquoted(text: str) -> str:
    """Return a text without the marks of `quoted`."""
    return QUOTED.sub(lambda found: found[0][0] + found[0][2:-1], text) if START in text else text
