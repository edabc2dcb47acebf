"""Dialogues as text: the format of a chat template, and the dialogues of the data."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The format of dialogues: a chat template formats messages as text and ends a turn with a token.


Messages = list[dict[str, Any]]  # the turns of a dialogue: "role", "content" and what else the data have
Tools = list[dict[str, Any]] | None  # JSON schemas of the functions that the assistant may call

PLAIN = "plain"  # the value of model.chat_template that selects `_PLAIN_TEMPLATE`
_PLAIN_TEMPLATE = "".join((files("rlhf.text") / "plain.jinja").read_text(encoding="utf-8").splitlines())
QUESTION = "question-of-a-user"  # a text that no template contains, as these two, which end differently:
ANSWERS = ("answer-of-an-assistant", "another-answer-of-the-assistants")
_MARK = "-mark-{}-"  # behind the content of a message, to see whether a template writes the content
_CALLS = "tool_calls"
_THINKING = re.compile(r"\A\{%- set enable_thinking = \w+ %\}")  # the first line of `set_thinking`


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, where: str = "the dialogue", tools: Tools = None
) -> str:
    """Return a prompt: the messages in the format of the chat template, then the start of a reply.

    Args:
        tokenizer: the tokenizer with the chat template.
        messages: the turns of the dialogue before the reply.
        where: the place of the dialogue, for error messages; for example "row 3 of the split train".
        tools: the functions that the assistant may call.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses the messages.
    """
    return formatted(tokenizer, messages, where, tools, add_generation_prompt=True)


def set_format(
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    conversational: bool,
    clock: str | None = None,
    thinking: bool | None = None,
) -> None:
    """Set the chat template of the tokenizer of a run, what it reads, and for dialogues the end token.

    Args:
        tokenizer: the tokenizer, which is changed.
        template: the value of `model.chat_template`; None keeps the template of the tokenizer.
        conversational: the prompts of the task are dialogues; see `end_responses_with_turns`.
        clock: the value of `model.clock`: the time that a template reads, in ISO format; None: the time at
            which this process rendered its first dialogue.
        thinking: the value of `model.thinking`; see `set_thinking`.

    Raises:
        UserError: the template cannot be read, does not format a dialogue, or has no choice of thinking; or
            there is none.
    """
    set_clock(tokenizer, clock)
    if template is not None:
        set_template(tokenizer, template)
    if conversational:
        end_responses_with_turns(tokenizer)
    set_thinking(tokenizer, thinking)


def set_template(tokenizer: PreTrainedTokenizerBase, chosen: str) -> None:
    """Set the chat template of a tokenizer to the value of `model.chat_template`.

    Args:
        tokenizer: the tokenizer, which is changed.
        chosen: "plain", or a file with a Jinja template. The plain format has a line with the role, such as
            `<|user|>`, before each message, and the end token after each reply.

    Raises:
        UserError: the file cannot be read, or contains no template that formats a dialogue.
    """
    if chosen == PLAIN:
        starts = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = ("{{ bos_token }}" if starts else "") + _PLAIN_TEMPLATE
        return
    try:
        text = Path(chosen).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"model.chat_template must be a file with a Jinja template or {PLAIN} ({error}), got {chosen!r}; "
            f"set model.chat_template={PLAIN}"
        ) from None
    with suppress(ValueError):
        if isinstance(json.loads(text), dict):  # such as tokenizer_config.json
            text = "{}"
    if text.strip() in ("", "{}"):
        raise UserError(
            f"model.chat_template must be a file with a Jinja template or {PLAIN}, got {chosen}, "
            f"{'a JSON file; write its template alone to a file' if text.strip() else 'an empty file'}; "
            f"or set model.chat_template={PLAIN}"
        )
    tokenizer.chat_template = text
    tokenizer.template_file = chosen  # for messages
    end_of_turn(tokenizer)  # raises an error if the file contains no template that formats a dialogue


def set_clock(tokenizer: PreTrainedTokenizerBase, clock: str | None) -> None:
    """Set the time that the chat template of a tokenizer reads; `clock` is in ISO format. None: no change."""
    if clock is not None:
        tokenizer.clock = datetime.fromisoformat(clock)


def set_thinking(tokenizer: PreTrainedTokenizerBase, thinking: bool | None) -> None:
    """Set whether the replies of a chat template begin with thoughts, also in a saved tokenizer.

    Args:
        tokenizer: the tokenizer, which is changed.
        thinking: the value of `model.thinking`; None: no change.

    Raises:
        UserError: the template does not read the variable `enable_thinking`.
    """
    text = _THINKING.sub("", str(tokenizer.chat_template or ""))
    if thinking is not None and "enable_thinking" not in text:
        raise UserError(
            "model.thinking must be null for a chat template without the variable enable_thinking, got "
            f"{str(thinking).lower()} with {template_name(tokenizer)}; set model.thinking=null"
        )
    if thinking is not None:
        tokenizer.chat_template = f"{{%- set enable_thinking = {str(thinking).lower()} %}}{text}"


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the special token with which the chat template ends a reply.

    Text after that token, such as a newline, belongs to the format of the next turn. Text between the reply
    and the token belongs to the reply.

    Returns:
        The token. None: the template writes no special token of the vocabulary after a reply.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses a question and an answer.
    """
    return _ending(tokenizer)[0]


def _ending(tokenizer: PreTrainedTokenizerBase) -> tuple[str | None, str]:
    """Return the token that ends a reply (see `end_of_turn`), and the text that follows the end of a turn."""
    turns = {"role": "user", "content": QUESTION}, {"role": "assistant"}
    wholes = [
        formatted(tokenizer, [turns[0], turns[1] | {"content": answer}], "a question with its answer")
        for answer in ANSWERS
    ]
    if wholes[0] == wholes[1]:
        raise UserError(
            f"model.chat_template must write the content of an answer, which is a text, got "
            f"{template_name(tokenizer)}, which writes the same for different answers; "
            "set model.chat_template=<file with a Jinja template>"
        )
    rest = os.path.commonprefix([whole[::-1] for whole in wholes])[::-1]
    places = {rest.find(token): token for token in _special(tokenizer) if token in rest}
    if not places:
        return None, rest[len(rest.rstrip()) :]
    first = min(places)
    token = max((each for each in _special(tokenizer) if rest.startswith(each, first)), key=len)
    return token, rest[first + len(token) :]


def _special(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the added and the special tokens of a vocabulary that can end a turn.

    The token for unknown characters cannot, and white space, which some vocabularies have as added tokens.
    """
    unfit = {tokenizer.unk_token} - {tokenizer.eos_token}  # some tokenizers use one token for both
    every = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens} - unfit
    return {token for token in every if token.strip()}


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the special tokens that can end a response, with their ids."""
    others = {tokenizer.pad_token, tokenizer.bos_token, tokenizer.unk_token} - {tokenizer.eos_token}
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {token: number for token, number in added.items() if token not in others}


def end_responses_with_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the end token of a tokenizer to the token that ends a reply in its chat template, if there is one.

    Generators stop at the end token, and training appends the end token to stored responses. Some tokenizers
    end a document with another token than a turn: for example, the base models of Qwen 2.5 have the end token
    `<|endoftext|>`, and their template ends a turn with `<|im_end|>`.
    """
    end = end_of_turn(tokenizer)
    if end is not None and end != tokenizer.eos_token:
        tokenizer.add_special_tokens({"eos_token": end})  # decoding then skips the token


def no_template(path: str) -> str:
    """Return the error message for dialogues and a tokenizer without a chat template.

    Args:
        path: hub name or folder of the tokenizer.
    """
    return (
        "model.chat_template must be set for dialogues (it formats the messages, and the tokenizer of "
        f"{path!r} has no chat template), got null; set model.chat_template={PLAIN} (a line such as <|user|> "
        "before each message) or model.chat_template=<file with a Jinja template>"
    )


def formatted(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, where: str, tools: Tools = None, **options: Any
) -> str:
    """Return messages in the format of the chat template; `options` are further arguments of the template.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise UserError(no_template(tokenizer.name_or_path))
    if getattr(tokenizer, "clock", None) is None:
        set_clock(tokenizer, datetime.now().isoformat())
    options |= {"tools": tools, "strftime_now": tokenizer.clock.strftime}
    try:
        text = written(tokenizer, messages, **options)
    except ImportError:  # of transformers or Jinja; the template is not at fault
        raise
    except Exception as error:  # a template is a program, and raises whatever its operations raise
        raise UserError(_refused(tokenizer, error, messages, where, options)) from None
    if not any(_CALLS in turn and turn["content"] == "" for turn in messages):
        return text
    # Some templates write the calls of a message only if its content is null, others print a null as "None".
    null = [
        {**turn, "content": None} if _CALLS in turn and not turn["content"] else turn for turn in messages
    ]
    try:
        other = written(tokenizer, null, **options)
    except Exception:  # as above; the template takes texts only
        return text
    return other if len(other) > len(text) and other.count("None") == text.count("None") else text


def written(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Tools = None, **options: Any
) -> str:
    """Return what the chat template writes for messages; `options` are its other variables.

    `apply_chat_template` gives templates no function from transformers 5.22 on, and no null from 5.24 on.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template = _compile_jinja_template(tokenizer.get_chat_template(tools=tools))
    variables = {"documents": None, "add_generation_prompt": False, **tokenizer.special_tokens_map, **options}
    return str(template.render(messages=messages, tools=tools, **variables))


def after_reply(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, before: Messages, where: str, **options: Any
) -> str | None:
    """Return what the chat template writes for messages behind the end token of a reply, and the next start.

    The messages `before` and an answer stand before them, in place of the real reply. None: the template does
    not end the answer with the end token of the tokenizer. The other arguments are those of `formatted`.

    Raises:
        UserError: the template refuses the messages.
    """
    answer = ANSWERS[0]
    while any(answer in message["content"] for message in messages):
        answer += "'"
    dialogue = [*before, {"role": "assistant", "content": answer}, *messages]
    whole = formatted(tokenizer, dialogue, where, add_generation_prompt=True, **options)
    _, ended, after = whole.rpartition(answer)[2].partition(str(tokenizer.eos_token))
    return after if ended else None


def template_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the name of a chat template for messages: its file, or that of the tokenizer."""
    file = getattr(tokenizer, "template_file", None)
    return file or f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"


def _refused(
    tokenizer: PreTrainedTokenizerBase,
    error: Exception,
    messages: Messages,
    where: str,
    options: dict[str, Any],
) -> str:
    """Return the error message for messages that a chat template does not format.

    The template is at fault if it formats no question of a user and no question with an answer either.
    """
    other = "set model.chat_template=<file with a Jinja template>"
    dialogue = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWERS[0]}]
    fits = 0
    for turns in (1, 2):
        with suppress(Exception):  # as in `formatted`
            written(tokenizer, dialogue[:turns], **options)
            fits += 1
    if not fits:
        line = getattr(error, "lineno", None)
        own = getattr(tokenizer, "template_file", None) is not None
        return (
            f"model.chat_template must format a question of a user, got {template_name(tokenizer)} with an "
            f"error{f' in line {line}' if line else ''} ({type(error).__name__}: {error}); correct "
            f"{'the file' if own else f'that template, or {other}'}"
        )
    roles = ", ".join(str(turn.get("role")) for turn in messages)
    return (
        f"model.chat_template must format every dialogue of the data (the template reports: {error}), got "
        f"the roles {roles} in {where}; change these messages, or {other}"
    )


# Control tokens, which the chat template writes, and texts of the data, which must not become such tokens.
#
# A text may contain the letters of a control token, such as `<|im_end|>`: a user quotes it, or a policy
# writes it, for which it is ordinary text. `quoted` marks these letters with two noncharacters of Unicode
# before a template formats the text. `rlhf.text.encoding` encodes marked letters as ordinary text, so no turn
# ends there. This module imports no torch and no transformers.


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


# Dialogues of the data as texts: prompts, and stored answers as the chat template writes them.


def said(message: dict[str, Any]) -> bool:
    """Return whether a message has a value besides its role."""
    return any(str(value).strip() for key, value in message.items() if key != "role")


class Dialogues:
    """The chat template of a tokenizer, applied to whole dialogues; counts what the template does not write.

    Args:
        tokenizer: the tokenizer with the chat template; its end token ends a reply (`set_format`).

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses a question and an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.end, self.rest = _ending(tokenizer)
        self.control = control_tokens(tokenizer)
        self.others = tuple(end_tokens(tokenizer))
        self.total = 0
        # Content that the template does not write: in how many dialogues, and the first of them. "": replies
        # that the template begins in another way.
        self.lost: Counter[str] = Counter()
        self.first: dict[str, str] = {}

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
        contents are quoted (`rlhf.text.chat`).

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
        prompt, shared, wholes, texts = self._wholes(messages, answers, where, tools)
        self.total += 1
        names = {""} if shared != prompt else set()
        names |= set(self._unwritten(messages, [], prompt, "", where, tools))
        for answer, whole, text in zip(answers, wholes, texts, strict=True):
            if not answer:
                continue
            own = whole[len(shared) :]
            unwritten = set(self._unwritten(answer, messages, whole, own, where, tools))
            empty = [*messages, {"role": answer[0]["role"], "content": ""}]
            missing = (
                not text.strip()
                or f"{_CALLS} of the answer" in unwritten
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
        self.lost.update(names)
        self.first |= {name: where for name in names if name not in self.first}
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
        _, shared, _, texts = self._wholes(messages, answers, where, tools)
        return shared, texts

    def quoted(self, *values: Any) -> list[Any]:
        """Return messages and tools with marks at what would become control tokens; see `control`."""
        return [quoted(value, self.control) for value in values]

    def _wholes(
        self, messages: Messages, answers: Sequence[Messages], where: str, tools: Tools
    ) -> tuple[str, str, list[str], list[str]]:
        """Return the prompt, what it shares with each dialogue, the K whole dialogues, and the K answers."""
        prompt = render(self.tokenizer, messages, where, tools)
        wholes = [
            formatted(self.tokenizer, [*messages, *answer], where, tools) if answer else prompt
            for answer in answers
        ]
        whole_prompt = all(whole.startswith(prompt) for whole in wholes)
        shared = prompt if whole_prompt else self._shared(prompt, wholes)
        if not whole_prompt and len(shared) < self._length(messages, prompt, where, tools):
            raise UserError(
                "model.chat_template must write the messages before an answer in the same way with and "
                f"without the answer, got another text from character {len(shared):,} of {where} on; "
                "leave that dialogue out, or set model.chat_template=<file with a Jinja template>"
            )
        rows = zip(wholes, answers, strict=True)
        texts = [self._turn(whole[len(shared) :]) if answer else "" for whole, answer in rows]
        return prompt, shared, wholes, texts

    def warnings(self, prompt_only: bool = False) -> Iterator[str]:
        """Yield a sentence for each kind of content that the template does not write as it is in the data."""
        shares = {
            name: f"{count:,} of {self.total:,} dialogues (first: {self.first[name]})"
            for name, count in sorted(self.lost.items())
        }
        shortened = shares.pop("", None)
        for name, share in shares.items():
            yield f"the chat template leaves out or changes the {name} in {share}"
        if shortened is not None:
            effect = "prompts end where both are equal"
            if prompt_only:
                effect = "reference responses do not continue their prompts"
            yield (
                "the chat template begins a reply in another way than the stored answers in "
                f"{shortened}; their {effect}"
            )

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
        whole = len(formatted(self.tokenizer, messages, where, tools).rstrip())
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
            ends = [
                {**message, "content": message["content"].rstrip() + _MARK.format(number)}
                for number, message in enumerate(messages)
            ]
            prompt = {} if before else {"add_generation_prompt": True}
            marked = formatted(self.tokenizer, [*before, *ends], where, tools, **prompt)
        for number, (message, content) in enumerate(zip(messages, contents, strict=True)):
            # Without a mark, the text of another message may be the same, or the text of the template
            found = content in own or (content in text and _MARK.format(number) in marked)
            if content and not found:
                yield f"content {of} with the role {message['role']}"
        for key in sorted({key for message in messages for key, value in message.items() if value}):
            if key not in ("role", "content"):
                without = [{name: each[name] for name in each if name != key} for each in messages]
                if self._same(text, [*before, *without], where, tools, not before):
                    yield f"{key} {of}"
        if tools and not before and self._same(text, messages, where, None, True):
            yield "tools"

    def _same(self, text: str, messages: Messages, where: str, tools: Tools, prompt: bool) -> bool:
        """Return whether the template writes `text` for the messages, too."""
        try:
            return text == formatted(self.tokenizer, messages, where, tools, add_generation_prompt=prompt)
        except UserError:
            return False
