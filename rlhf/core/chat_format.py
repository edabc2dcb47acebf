"""The format of dialogues: a chat template formats messages as text and ends a turn with a token.

This module imports no torch, and transformers only for its tokenizers.
"""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]  # the turns of a dialogue: "role", "content" and what else the data have
Tools = list[dict[str, Any]] | None  # JSON schemas of the functions that the assistant may call

PLAIN = "plain"  # the value of model.chat_template that selects `_PLAIN_TEMPLATE`
_PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' }}{{ '\\n' }}"
    "{% endfor %}"
    "{{ '<|assistant|>\\n' if add_generation_prompt }}"
)
QUESTION = "question-of-a-user"  # a text that no template contains, as these two, which end differently:
ANSWERS = ("answer-of-an-assistant", "another-answer-of-the-assistants")
MARK = "-mark-{}-"  # behind the content of a message, to see whether a template writes the content
CALLS = "tool_calls"


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
    tokenizer: PreTrainedTokenizerBase, template: str | None, conversational: bool, clock: str | None = None
) -> None:
    """Set the chat template of the tokenizer of a run and its clock, and for dialogues the end token.

    Args:
        tokenizer: the tokenizer, which is changed.
        template: the value of `model.chat_template`; None keeps the template of the tokenizer.
        conversational: the prompts of the task are dialogues; see `end_responses_with_turns`.
        clock: the value of `model.clock`: the time that a template reads, in ISO format; None: the time at
            which this process rendered its first dialogue.

    Raises:
        UserError: the template cannot be read, or does not format a dialogue; or there is none.
    """
    set_clock(tokenizer, clock)
    if template is not None:
        set_template(tokenizer, template)
    if conversational:
        end_responses_with_turns(tokenizer)


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
    if not text.strip() or _is_json(text):
        raise UserError(
            f"model.chat_template must be a file with a Jinja template or {PLAIN}, got {chosen}, "
            f"{'a JSON file; write its template alone to a file' if text.strip() else 'an empty file'}; "
            f"or set model.chat_template={PLAIN}"
        )
    tokenizer.chat_template = text
    tokenizer.template_file = chosen  # for messages
    end_of_turn(tokenizer)  # raises an error if the file contains no template that formats a dialogue


def _is_json(text: str) -> bool:
    """Return whether a text is a JSON object, such as tokenizer_config.json."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def set_clock(tokenizer: PreTrainedTokenizerBase, clock: str | None) -> None:
    """Set the time that the chat template of a tokenizer reads; `clock` is in ISO format. None: no change."""
    if clock is not None:
        tokenizer.clock = datetime.fromisoformat(clock)


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the special token with which the chat template ends a reply.

    Text after that token, such as a newline, belongs to the format of the next turn. Text between the reply
    and the token belongs to the reply.

    Returns:
        The token. None: the template writes no special token of the vocabulary after a reply.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses a question and an answer.
    """
    return ending(tokenizer)[0]


def ending(tokenizer: PreTrainedTokenizerBase) -> tuple[str | None, str]:
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
    if not any(CALLS in turn and turn["content"] == "" for turn in messages):
        return text
    # Some templates write the calls of a message only if its content is null, others print a null as "None".
    null = [{**turn, "content": None} if CALLS in turn and not turn["content"] else turn for turn in messages]
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
    if all(_fails(tokenizer, dialogue[:turns], options) for turns in (1, 2)):
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


def _fails(tokenizer: PreTrainedTokenizerBase, messages: Messages, options: dict[str, Any]) -> bool:
    """Return whether the chat template raises an error for messages."""
    try:
        written(tokenizer, messages, **options)
    except Exception:  # as in `formatted`
        return True
    return False
