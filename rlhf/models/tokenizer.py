"""Loading of tokenizers from the hub or local folders, and checks that a tokenizer fits a model."""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import cached_file

from rlhf.core.errors import UserError
from rlhf.models.folder import fetch, first_line, is_local
from rlhf.models.headers import ENDS, TOKENIZER_FILES, choose_pad_token, end_ids, pad_problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def read_tokenizer(
    path: str, trust_remote_code: bool = False, key: str = "model.policy"
) -> PreTrainedTokenizerFast:
    """Return the fast tokenizer at `path`, with padding on the left and the pad token of its files, if any.

    Raises:
        UserError: there is no fast tokenizer at `path`, its files are damaged, or it has no end token.
    """
    folder = Path(path).expanduser()
    if is_local(path) and folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(_without_tokenizer(key, path))
    try:
        tokenizer = fetch(AutoTokenizer, path, key, trust_remote_code=trust_remote_code, padding_side="left")
    except UserError:
        raise
    except Exception as error:  # damaged files: transformers and tokenizers have no exception class for them
        raise UserError(
            f"{key} must come with a tokenizer that can be read ({type(error).__name__}: "
            f"{first_line(error)}), got {path!r}; copy tokenizer.json and tokenizer_config.json again, or "
            "set model.tokenizer=<hub name or folder>"
        ) from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(
            f"{key} must come with a fast tokenizer (tokenizer.json), got {path!r}; choose another model"
        )
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(_without_tokenizer(key, path))  # transformers returns an empty tokenizer
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{key} must come with a tokenizer that has an end token (it ends every response), got {path!r} "
            f'with eos_token {tokenizer.eos_token!r}; set "eos_token" in its tokenizer_config.json, or set '
            "model.tokenizer=<hub name or folder>"
        )
    return tokenizer


def _without_tokenizer(key: str, path: str) -> str:
    """Return the error message for a model without tokenizer files."""
    return (
        f"{key} must come with its tokenizer (tokenizer.json), got {path!r} without a tokenizer; set "
        "model.tokenizer=<hub name or folder>"
    )


def set_pad_token(
    tokenizer: PreTrainedTokenizerFast,
    chosen: str | None,
    key: str = "model.pad_token",
    models: Collection[str] = (),
) -> str | None:
    """Set the pad token of the tokenizer of a model that is trained.

    Args:
        tokenizer: the tokenizer, which is changed.
        chosen: the pad token. None: the pad token of the tokenizer; if it has none, or uses its end token as
            pad token, a token that stands for nothing (`choose_pad_token`).
        key: config key of `chosen`, for error messages.
        models: hub names or folders of models, whose end tokens are not used as pad token.

    Returns:
        A note about the pad token that was found for a tokenizer without one; None: it needed none.

    Raises:
        UserError: the pad token is missing, not in the vocabulary, or equal to the end token.
    """
    ids, path, pad, end = (
        tokenizer.get_vocab(),
        tokenizer.name_or_path,
        tokenizer.pad_token,
        tokenizer.eos_token,
    )
    found = None
    if chosen is None and pad in (None, end):
        template = json.dumps(tokenizer.chat_template, ensure_ascii=False)
        found = choose_pad_token(ids, {end, *declared_ends(models)}, tokenizer.bos_token, template)
    if problem := pad_problem(key, chosen, path, ids, found or pad, end):
        raise UserError(problem)
    if chosen is not None:
        tokenizer.pad_token = chosen
    if found is not None:
        tokenizer.add_special_tokens({"pad_token": found})  # decoding then skips the token
        return f"{found} (chosen: the model has no pad token of its own; another one: {key}=<token>)"
    return None


def declared_ends(models: Collection[str]) -> set[int]:
    """Return the ids of the end tokens that the files of models declare."""
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    files = []
    for model, name in product(models, ENDS):
        path = str(Path(model).expanduser()) if is_local(model) else model
        file = cached_file(path, name, local_files_only=True, **quiet)
        files.append(file if file or is_local(model) else cached_file(path, name, **quiet))
    return set(end_ids(*files))


def stop_ids(tokenizer: PreTrainedTokenizerFast, models: Collection[str]) -> list[int]:
    """Return the ids of all tokens that end a response, the end token of the tokenizer first.

    A chat model often declares two: the end of a turn and the end of a document.

    Args:
        tokenizer: the tokenizer of the run. Its end token is the end of a turn if the task has dialogues; the
            end token in its files also ends a response.
        models: hub names or folders of models, whose files declare further end tokens. Ids that no token of
            the tokenizer has are left out.
    """
    tokens = tokenizer.get_vocab()
    own, known = tokens.get(str(tokenizer.init_kwargs.get("eos_token"))), set(tokens.values())
    ends = [tokenizer.eos_token_id, own, *sorted(declared_ends(models))]
    return [number for number in dict.fromkeys(ends) if number in known]


def fill_pad_token(tokenizer: PreTrainedTokenizerFast, chosen: str | None, key: str) -> None:
    """Set the pad token of the tokenizer of a model that is only evaluated.

    Any token can be the pad token, because the masks exclude padding from every result.

    Args:
        tokenizer: the tokenizer, which is changed.
        chosen: the pad token; None selects the pad token of the tokenizer, or else its end token.
        key: config key of `chosen`, for error messages.

    Raises:
        UserError: the pad token is not in the vocabulary.
    """
    pad = chosen or tokenizer.pad_token or tokenizer.eos_token
    if problem := pad_problem(key, pad, tokenizer.name_or_path, tokenizer.get_vocab(), pad, end=None):
        raise UserError(problem)
    tokenizer.pad_token = pad


def same_tokens(one: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast) -> bool:
    """Return True if two tokenizers have the same vocabulary and the same end token."""
    return one.get_vocab() == other.get_vocab() and one.eos_token_id == other.eos_token_id


def check_vocabulary(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, key: str = "model.tokenizer"
) -> None:
    """Check that every token id of the tokenizer has an embedding in the model.

    A tokenizer with fewer ids than embeddings is accepted.

    Args:
        model: the model.
        tokenizer: the tokenizer.
        key: config key of the tokenizer or of the model, for error messages.

    Raises:
        UserError: the largest token id has no embedding.
    """
    rows = model.config.get_text_config().vocab_size
    largest = max(tokenizer.get_vocab().values())
    if largest >= rows:
        raise UserError(
            f"{key} must fit the model (every token id needs an embedding), got ids up to {largest} and "
            f"{rows} embeddings; set {key} to the tokenizer that the model was trained with"
        )
