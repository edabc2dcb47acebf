"""Dialogues of the data as texts: prompts, and stored answers as the chat template writes them.

This module imports no torch and no transformers.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rlhf.core.chat_format import CALLS, MARK, Messages, Tools, after_reply, ending, formatted, render
from rlhf.core.control import control_tokens, quoted
from rlhf.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def said(message: dict[str, Any]) -> bool:
    """Return whether a message has a value besides its role."""
    return any(str(value).strip() for key, value in message.items() if key != "role")


@dataclass(slots=True)
class Lost:
    """Content of the data that a chat template does not write: in how many dialogues, and the first."""

    count: int = 0
    first: str = ""


class Dialogues:
    """The chat template of a tokenizer, applied to whole dialogues; counts what the template does not write.

    Args:
        tokenizer: the tokenizer with the chat template; its end token ends a reply (`set_format`).

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses a question and an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.end, self.rest = ending(tokenizer)
        self.control = control_tokens(tokenizer)
        added = tokenizer.added_tokens_decoder.values()
        unfit = {tokenizer.unk_token, tokenizer.pad_token, tokenizer.bos_token} - {tokenizer.eos_token}
        self.others = tuple({str(token) for token in added if token.special} - unfit)
        self.total = 0
        self.lost: defaultdict[str, Lost] = defaultdict(Lost)
        self.shortened = Lost()

    def write(
        self,
        messages: Messages,
        answers: Sequence[Messages],
        where: str = "the dialogue",
        tools: Tools = None,
        *,
        prompt_only: bool = False,
    ) -> tuple[str, list[str]]:
        """Return the prompt and the K answers of a dialogue, as the template writes the whole dialogue.

        The answer is the text behind the part that the whole dialogue shares with the prompt, up to the end
        of the turn, without the end token of the tokenizer. If the template does not begin an answer as it
        begins a reply, for example with a block of reasoning, the prompt ends earlier. Control tokens in the
        contents are quoted (`rlhf.core.control`).

        Args:
            messages: the turns before the answers.
            answers: K lists with one message of the assistant, or none (the answer is then "").
            where: the place of the dialogue, for error messages.
            tools: the functions that the assistant may call.
            prompt_only: responses to the prompt are sampled, so the prompt stays as it is, and answers are
                references.

        Raises:
            UserError: the template refuses the messages, does not write an answer, or writes the messages
                before an answer in another way than without it.
        """
        messages, answers, tools = self.quoted(messages, answers, tools)
        prompt, shared, wholes = self._wholes(messages, answers, where, tools)
        texts = self._texts(shared, wholes, answers)
        if shared != prompt:
            self._note(self.shortened, where)
        self.total += 1
        names = set(self._unwritten(messages, [], prompt, "", where, tools))
        for answer, whole, text in zip(answers, wholes, texts, strict=True):
            if not answer:
                continue
            own = whole[len(shared) :]
            unwritten = set(self._unwritten(answer, messages, whole, own, where, tools))
            empty = [*messages, {"role": answer[0]["role"], "content": ""}]
            missing = (
                not text.strip()
                or f"{CALLS} of the answer" in unwritten
                or bool(unwritten and self._same(whole, empty, where, tools, prompt=False))
            )
            if missing and not prompt_only and said(answer[0]):
                keys = " and the ".join(key for key in answer[0] if key != "role")
                raise UserError(
                    "model.chat_template must write the answers that are trained on, got a template that "
                    f"does not write the {keys} of the answer in {where}; leave that row out, or set "
                    "model.chat_template=<file with a Jinja template that writes it>"
                )
            names |= unwritten
        for name in names:
            self._note(self.lost[name], where)
        return prompt if prompt_only else shared, texts

    def episode(
        self, messages: Messages, turns: Messages, where: str = "the dialogue", tools: Tools = None
    ) -> tuple[str, list[str]]:
        """Return the prompt and the parts of a dialogue with several replies: a reply, messages, a reply, ...

        Each reply is that of `write`, as if it was the last. Messages begin behind the end token of the reply
        before them and end with the start of the next reply, as those of an environment. So an earlier turn
        stays as it was, also if the template changes it later.

        Args:
            messages: the messages before the first reply.
            turns: the first reply and all after it, the last reply included.
            where: the place of the dialogue, for error messages.
            tools: the functions that the assistant may call.

        Raises:
            UserError: as in `write`; or the template does not end each reply with the end token.
        """
        messages, turns, tools = self.quoted(messages, turns, tools)
        whole, start, parts = [*messages, *turns], "", list[str]()
        replies = [i for i in range(len(messages), len(whole)) if whole[i]["role"] == "assistant"]
        replies = replies or [len(whole)]  # the last reply is missing
        for before, i in pairwise([-1, *replies]):
            write = self.write if i == replies[-1] else self.continued  # counts what is not written, once
            shared, (reply,) = write(whole[:i], [whole[i : i + 1]], where, tools)
            if not parts:
                start, parts = shared, [reply]
                continue
            between = after_reply(self.tokenizer, whole[before + 1 : i], whole[:before], where, tools=tools)
            if between is None:
                raise UserError(
                    "task.all_replies must be false for a chat template that ends no reply with the end "
                    "token, got true; set task.all_replies=false or model.chat_template=plain"
                )
            prompt = render(self.tokenizer, whole[:i], where, tools)
            parts += [between.removesuffix(prompt.removeprefix(shared)), reply]
        return start, parts

    def continued(
        self, messages: Messages, answers: Sequence[Messages], where: str, tools: Tools = None
    ) -> tuple[str, list[str]]:
        """Return what `write` returns, for sampled answers: nothing is counted, and no answer is refused."""
        messages, answers, tools = self.quoted(messages, answers, tools)
        _, shared, wholes = self._wholes(messages, answers, where, tools)
        return shared, self._texts(shared, wholes, answers)

    def quoted(self, *values: Any) -> list[Any]:
        """Return messages and tools with marks at what would become control tokens; see `control`."""
        return [quoted(value, self.control) for value in values]

    def _wholes(
        self, messages: Messages, answers: Sequence[Messages], where: str, tools: Tools
    ) -> tuple[str, str, list[str]]:
        """Return the prompt, the part that it shares with each whole dialogue, and the K whole dialogues."""
        prompt = render(self.tokenizer, messages, where, tools)
        wholes = [
            self._format([*messages, *answer], where, tools) if answer else prompt for answer in answers
        ]
        if all(whole.startswith(prompt) for whole in wholes):
            return prompt, prompt, wholes
        shared = self._shared(prompt, wholes)
        if len(shared) < self._length(messages, prompt, where, tools):
            raise UserError(
                "model.chat_template must write the messages before an answer in the same way with and "
                f"without the answer, got another text from character {len(shared):,} of {where} on; "
                "leave that dialogue out, or set model.chat_template=<file with a Jinja template>"
            )
        return prompt, shared, wholes

    def _texts(self, shared: str, wholes: Sequence[str], answers: Sequence[Messages]) -> list[str]:
        rows = zip(wholes, answers, strict=True)
        return [self._turn(whole[len(shared) :]) if answer else "" for whole, answer in rows]

    def warnings(self, prompt_only: bool = False) -> Iterator[str]:
        """Yield a sentence for each kind of content that the template does not write as it is in the data."""
        for name, lost in sorted(self.lost.items()):
            yield f"the chat template leaves out or changes the {name} in {self._share(lost)}"
        if self.shortened.count:
            effect = "prompts end where both are equal"
            if prompt_only:
                effect = "reference responses do not continue their prompts"
            yield (
                "the chat template begins a reply in another way than the stored answers in "
                f"{self._share(self.shortened)}; their {effect}"
            )

    def _share(self, lost: Lost) -> str:
        return f"{lost.count:,} of {self.total:,} dialogues (first: {lost.first})"

    def _format(self, messages: Messages, where: str, tools: Tools) -> str:
        return formatted(self.tokenizer, messages, where, tools)

    def _note(self, lost: Lost, where: str) -> None:
        lost.count += 1
        lost.first = lost.first or where

    def _shared(self, prompt: str, wholes: Sequence[str]) -> str:
        """Return the longest common start of all texts that ends at the end of a token of each of them."""
        texts = [prompt, *wholes]
        encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        common = len(os.path.commonprefix(texts))
        tokens = len(os.path.commonprefix(ids))
        while tokens and offsets[0][tokens - 1][1] > common:
            tokens -= 1
        return prompt[: offsets[0][tokens - 1][1]] if tokens else ""

    def _length(self, messages: Messages, prompt: str, where: str, tools: Tools) -> int:
        """Return the number of characters that the template writes for the messages of a prompt at least.

        The template may write another text behind all messages, if no reply follows. So the last content
        counts, too.
        """
        whole = len(self._format(messages, where, tools).rstrip())
        content = messages[-1]["content"].strip()
        place = prompt.rfind(content) if content else -1
        return whole if place < 0 else min(whole, place + len(content))

    def _turn(self, text: str) -> str:
        """Return the text of an answer up to the end of its turn; see `write`.

        If the answer itself ends with a special token, the text includes the end token of the tokenizer.
        """
        if self.end is not None and self.end == self.tokenizer.eos_token:
            answer, found, rest = text.removesuffix(self.rest).rpartition(self.end)
            if found and not rest.strip():
                return answer + self.end * answer.endswith(self.others)
        stripped = text.rstrip()
        if stripped.endswith(self.others):
            return stripped  # another end of a turn, such as after the call of a tool
        return text.removesuffix(self.rest)

    def _unwritten(
        self, messages: Messages, before: Messages, text: str, own: str, where: str, tools: Tools
    ) -> Iterator[str]:
        """Yield names of what `text`, the template's text of `before` and `messages`, does not contain.

        `own` is the part of `text` that the template writes for `messages` only.
        """
        of = "of the answer" if before else "of a message"
        contents = [message["content"].strip() for message in messages]
        marked = ""
        if any(content in text and content not in own for content in contents):
            marked = self._marked(messages, before, where, tools)
        for number, (message, content) in enumerate(zip(messages, contents, strict=True)):
            # Without a mark, the text of another message may be the same, or the text of the template
            found = content in own or (content in text and MARK.format(number) in marked)
            if content and not found:
                yield f"content {of} with the role {message['role']}"
        for key in sorted({key for message in messages for key, value in message.items() if value}):
            if key not in ("role", "content"):
                without = [{name: each[name] for name in each if name != key} for each in messages]
                if self._same(text, [*before, *without], where, tools, not before):
                    yield f"{key} {of}"
        if tools and not before and self._same(text, messages, where, None, True):
            yield "tools"

    def _marked(self, messages: Messages, before: Messages, where: str, tools: Tools) -> str:
        """Return the text of `before` and `messages` with a mark behind each content of `messages`."""
        marked = [
            {**message, "content": message["content"].rstrip() + MARK.format(number)}
            for number, message in enumerate(messages)
        ]
        prompt = {} if before else {"add_generation_prompt": True}
        return formatted(self.tokenizer, [*before, *marked], where, tools, **prompt)

    def _same(self, text: str, messages: Messages, where: str, tools: Tools, prompt: bool) -> bool:
        """Return whether the template writes `text` for the messages, too."""
        try:
            return text == formatted(self.tokenizer, messages, where, tools, add_generation_prompt=prompt)
        except UserError:
            return False
