"""Messages of an environment as tokens: what stands between two replies of a model.

An episode only grows: the sampled tokens of a reply, then the tokens of a message and the start of a reply.
No dialogue is formatted or tokenized again, because the sampled tokens could change. Instead, the template
formats the message behind a short dialogue in place of the real one. This is exact if the template writes a
message in the same way after every reply; `Turns` checks this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlhf.core.chat_format import (
    ANSWERS,
    PLAIN,
    QUESTION,
    after_reply,
    formatted,
    no_template,
    render,
    template_name,
)
from rlhf.core.control import ROLE_MARK
from rlhf.core.encoding import message_tokens
from rlhf.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER, _EARLIER_ANSWER = ANSWERS
_MESSAGE, _EARLIER_MESSAGE = "message-of-an-environment", "earlier-words"
_PROBES = (_MESSAGE, "", "12", f" {_MESSAGE} 1\n", f"{{'a': [1]}}\n\n{_MESSAGE}")
_THOUGHT = "thought-of-an-assistant"
_LEFT_OUT = "\n[... left out ...]\n"  # in place of the middle of a long message
_CHARACTERS = 8  # characters of a message that are read at most, for each token of the limit


class Turns:
    """The messages of an environment as tokens behind the end token of a reply.

    Args:
        tokenizer: a fast tokenizer with a chat template; its end token ends a reply (`set_format`).
        role: the role of the messages, such as "user" or "tool".
        limit: largest number of tokens of a message, with its role marks and the start of the next reply.
        options: further arguments of the chat template, such as `tools`.

    Raises:
        UserError: the template does not write a message in the same way after every reply, or the limit has
            no room for a shortened message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, role: str, limit: int, **options: Any) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.role, self.limit = role, limit
        if not tokenizer.chat_template:
            raise UserError(no_template(tokenizer.name_or_path))
        if fault := self._fault(role):
            user = "environment.role=user or " if role != "user" and not self._fault("user") else ""
            raise UserError(
                f"model.chat_template must write a message with the role {role} in the same way after every "
                f"reply ({fault}), got {template_name(tokenizer)}; set {user}model.chat_template={PLAIN} or "
                "model.chat_template=<file with a Jinja template that does so>"
            )
        # Some vocabularies have white space and letters as added tokens
        added = tokenizer.added_tokens_decoder.items()
        self._control = {id for id, token in added if token.special or len(token.content.strip()) > 1}
        self._control -= {tokenizer.unk_token_id} - {tokenizer.eos_token_id}  # unknown characters may stay
        self._own = sum(id in self._control for id in self._message("", role)[1])
        self._before, _, self._after = self._message(_MESSAGE, role)[0].partition(_MESSAGE)
        marks = ROLE_MARK.findall(self._before + self._after)
        self._marks = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        if (least := len(self._message(_LEFT_OUT, role)[1])) > limit:
            raise UserError(
                f"environment.message_tokens must be at least {least} (role marks, {_LEFT_OUT.strip()!r}), "
                f"got {limit}; set environment.message_tokens={max(512, 2 * least)}"
            )

    def tokens(self, text: str) -> list[int]:
        """Return a message as at most `limit` token ids: all between two replies of an episode.

        Control tokens and role marks in the text are removed, so that the text cannot end the message. A text
        that is too long keeps its start and its end.
        """
        text = text.encode(errors="replace").decode()  # half a surrogate pair has no tokens
        if len(text) > (most := _CHARACTERS * self.limit):
            text = _shortened(text, most)
        _, ids = self._message(text, self.role)
        if self._marks.search(text) or sum(id in self._control for id in ids) > self._own:
            text = self._without_marks(text)
            _, ids = self._message(text, self.role)
        kept = len(text)
        while len(ids) > self.limit:
            kept = kept * (self.limit - 1) // len(ids)
            _, ids = self._message(_shortened(text, kept), self.role)
        return ids

    def text(self, ids: list[int]) -> str:
        """Return the text of a message from its token ids, without the marks of the template around it."""
        return str(self.tokenizer.decode(ids)).removeprefix(self._before).removesuffix(self._after)

    @property
    def describes_tools(self) -> bool:
        """Whether the template writes the descriptions of tools into a prompt."""
        plain = render(self.tokenizer, [{"role": "user", "content": QUESTION}])
        return self._write([("user", QUESTION)]) != plain

    def warnings(self) -> Iterator[str]:
        """Yield a sentence for each way in which the template formats a dialogue other than as an episode."""
        if _THOUGHT not in self._dialogue(f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}", self.role, _MESSAGE):
            yield "the chat template leaves out the thoughts of earlier replies; an episode keeps them"
        if self.options.get("tools") and not self.describes_tools:
            yield "the chat template does not write the descriptions of tools; the prompts must have them"
        start, whole = self._write([("user", QUESTION)]), self._dialogue(_ANSWER, self.role, _MESSAGE)
        if not (before := whole.rpartition(_ANSWER)[0]).startswith(start):
            same = before.rpartition(QUESTION)[0] == start.rpartition(QUESTION)[0]
            what = "a finished reply otherwise than the start of a reply" if same else "earlier messages anew"
            yield f"the chat template formats {what}; an episode stays as it was sampled"

    def _fault(self, role: str) -> str | None:
        """Return why messages cannot be appended to an episode; None if they can."""
        try:
            for text in _PROBES:
                after, ids = self._message(text, role)
                if _MESSAGE in text and _MESSAGE not in after:
                    return "it leaves out or changes the message"
                for earlier in range(3):
                    if self._message(text, role, earlier)[0] != after:
                        return "its text depends on earlier messages"
                    whole, _ = self._encode(self._dialogue(_ANSWER, role, text, earlier))
                    if whole[-len(ids) - 1 :] != [self.tokenizer.eos_token_id, *ids]:
                        return "its tokens depend on earlier messages"
        except ValueError as error:  # an error of the template is the cause of a `UserError`
            return str(error.__context__ or error)
        return None

    def _write(self, turns: list[tuple[str, str]]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        return formatted(self.tokenizer, messages, "an episode", add_generation_prompt=True, **self.options)

    def _dialogue(self, answer: str, role: str, text: str, earlier: int = 0) -> str:
        between = [("assistant", _EARLIER_ANSWER), (role, _EARLIER_MESSAGE)] * earlier
        return self._write([("user", QUESTION), *between, ("assistant", answer), (role, text)])

    def _message(self, text: str, role: str, earlier: int = 0) -> tuple[str, list[int]]:
        """Return a message and the start of the next reply as text and tokens, behind the end of a reply."""
        turn = {"role": "assistant", "content": _EARLIER_ANSWER}, {"role": role, "content": _EARLIER_MESSAGE}
        message, before = {"role": role, "content": text}, [{"role": "user", "content": QUESTION}]
        before += turn * earlier
        after = after_reply(self.tokenizer, [message], before, "an episode", **self.options)
        if after is None:
            raise ValueError(f"it does not end earlier replies with {self.tokenizer.eos_token}")
        return after, message_tokens(self.tokenizer, [after])[0]

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoded["input_ids"], encoded["offset_mapping"]

    def _without_marks(self, text: str) -> str:
        """Return a text without control tokens and role marks, also those that a removal brings together."""
        removed = None
        while removed != set():
            spans = [span for id, span in zip(*self._encode(text), strict=True) if id in self._control]
            spans += [mark.span() for mark in self._marks.finditer(text)]
            removed = {place for span in spans for place in range(*span)}
            text = "".join(letter for place, letter in enumerate(text) if place not in removed)
        return text


def _shortened(text: str, kept: int) -> str:
    """Return the first and last characters of a text, `kept` in all, with a mark between."""
    return text[: kept - kept // 2] + _LEFT_OUT + text[len(text) - kept // 2 :]
