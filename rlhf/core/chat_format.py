"""The format of dialogues: a chat template formats messages as text and ends a turn with a token.

This module imports no torch and no transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, str]]  # the turns of a dialogue, each with the keys "role" and "content"

PLAIN = "plain"  # the value of model.chat_template that selects `PLAIN_TEMPLATE`
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' }}{{ '\\n' }}"
    "{% endfor %}"
    "{{ '<|assistant|>\\n' if add_generation_prompt }}"
)
QUESTION, ANSWER = "question-of-a-user", "answer-of-an-assistant"  # texts that no template contains


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, where: str = "the dialogue") -> str:
    """Return a prompt: the messages in the format of the chat template, then the start of a reply.

    Args:
        tokenizer: the tokenizer with the chat template.
        messages: the turns of the dialogue before the reply.
        where: the place of the dialogue, for error messages; for example "row 3 of the split train".

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses the messages.
    """
    return _format(tokenizer, messages, where, add_generation_prompt=True)


def set_format(tokenizer: PreTrainedTokenizerBase, template: str | None, conversational: bool) -> None:
    """Set the chat template of the tokenizer of a run, and for dialogues the end token.

    Args:
        tokenizer: the tokenizer, which is changed.
        template: the value of `model.chat_template`; None keeps the template of the tokenizer.
        conversational: the prompts of the task are dialogues; see `end_responses_with_turns`.

    Raises:
        UserError: the template cannot be read, or does not format a dialogue; or there is none.
    """
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
        tokenizer.chat_template = ("{{ bos_token }}" if starts else "") + PLAIN_TEMPLATE
        return
    try:
        tokenizer.chat_template = Path(chosen).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"model.chat_template must be a file with a Jinja template or {PLAIN} ({error}), got {chosen!r}; "
            f"set model.chat_template={PLAIN}"
        ) from error
    end_of_turn(tokenizer)  # raises an error if the file contains no template that formats a dialogue


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the special token that the chat template writes after a reply.

    Text after that token, such as a newline, belongs to the format of the next turn.

    Returns:
        The token. None: the template writes nothing after a reply, or writes a text that does not begin with
        a special token of the vocabulary.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses a question and an answer.
    """
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    rest = _format(tokenizer, turns, "a question with its answer").rpartition(ANSWER)[2].strip()
    ids = tokenizer(rest, add_special_tokens=False)["input_ids"]
    special = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens} - {tokenizer.unk_token}
    first = tokenizer.convert_ids_to_tokens(ids[:1])
    return next((token for token in first if token in special or token == tokenizer.eos_token), None)


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


def _format(tokenizer: PreTrainedTokenizerBase, messages: Messages, where: str, **options: Any) -> str:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise UserError(no_template(tokenizer.name_or_path))
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        roles = ", ".join(str(turn.get("role")) for turn in messages)
        raise UserError(
            f"model.chat_template must format every dialogue of the data (the template reports: {error}), "
            f"got the roles {roles} in {where}; change these messages, or set model.chat_template=<file with "
            "a Jinja template>"
        ) from error
