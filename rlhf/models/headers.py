"""What the files of a local model folder state, read without loading the model. This module imports no torch.

The header of a safetensors file lists the names, shapes and dtypes of its tensors; tokenizer.json lists the
vocabulary. Reading both takes well below a second for models of any size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rlhf.core.errors import setting

_LARGEST_HEADER = 10**8  # bytes; the limit of the safetensors format
_Place = tuple[Path, int, int]  # file, first byte, number of bytes
_LFS_POINTER = "version https://git-lfs"  # begin of a file that stands for a large file in a Git repository
INDEX = "model.safetensors.index.json"  # tensor -> file, for weights in several files
# Files from which transformers builds a tokenizer, most common first.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
)
# Tokenizer classes without special tokens of their own. Other classes have defaults, such as </s> for Llama.
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Model types for which transformers replaces a generic class by a class with special tokens of its own.
_REPLACED_CLASSES = ("qwen2", "phi3")
# Model types whose blocks all have the same tensors, under the names of the modules in transformers.
_UNIFORM = (
    "llama", "mistral", "gpt_neox", "gpt2", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "olmo2",
)  # fmt: skip
SPECIAL = ("eos_token", "pad_token", "bos_token")  # keys of special tokens in the files of a tokenizer
_EMBEDDINGS = (
    "embed_tokens.weight",
    "embed_in.weight",
    "wte.weight",
)  # ends of the names of input embeddings
HEADS = ("lm_head.weight", "embed_out.weight")  # names of output heads


class DamagedFile(ValueError):
    """A file of a model folder is missing, truncated or malformed. The message names file and defect."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor of a safetensors file."""

    shape: tuple[int, ...]
    dtype: str  # as in the file, for example "F32" or "BF16"
    place: _Place = field(default=(Path(), 0, 0), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerHeader:
    """The vocabulary and the special tokens of a tokenizer."""

    ids: dict[str, int]  # token -> id
    special: dict[str, str | None]  # key of `SPECIAL` -> token; a key is missing if no file determines it
    template: str | None  # the chat template; several templates as one text

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self.template is not None

    @property
    def largest_id(self) -> int:
        """The largest token id."""
        return max(self.ids.values())


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`.

    Raises:
        DamagedFile: the file is missing, or does not contain a JSON object.
    """
    try:
        content = file.read_text(encoding="utf-8")
        if content.startswith(_LFS_POINTER):
            raise DamagedFile(f"{file.name} is a pointer of Git LFS; run: git lfs pull")
        found = json.loads(content)
    except DamagedFile:
        raise
    except OSError as error:
        defect = f"{file.name}: {error.strerror}" if file.exists() else f"no {file.name}"
        raise DamagedFile(defect) from None
    except ValueError as error:  # no JSON, or no UTF-8
        raise DamagedFile(f"{file.name} is not a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise DamagedFile(f"{file.name} is not a JSON object")
    return found


def versions(files: Iterable[Path]) -> tuple[tuple[int, int], ...]:
    """Return modification time and size of each existing file, a key for caching what the files contain."""
    states = [file.stat() for file in files if file.is_file()]
    return tuple((state.st_mtime_ns, state.st_size) for state in states)


# -- weights ---------------------------------------------------------------------------------------


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files from which transformers loads the model in `folder`.

    Raises:
        DamagedFile: there is no such file, or the index of several files is damaged.
    """
    whole, index = folder / "model.safetensors", folder / INDEX
    if whole.is_file():
        return [whole]
    if index.is_file():
        return [folder / name for name in sorted(set(_read_index(index).values()))]
    if any(folder.glob("*.safetensors")):
        raise DamagedFile(f"neither model.safetensors nor {INDEX}")
    patterns = ("*.bin", "*.pt", "*.pth", "*.h5")
    other = next((file.name for pattern in patterns for file in folder.glob(pattern)), None)
    only = f", only {other}" if other else ""
    raise DamagedFile(f"no *.safetensors{only}; reading other formats can execute code")


def _read_index(index: Path) -> dict[str, str]:
    """Return the file name of every tensor that an index lists.

    Raises:
        DamagedFile: the index is malformed.
    """
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise DamagedFile(f"{index.name} has no weight_map of tensors and files")
    return names


def weight_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the name, shape and dtype of every tensor in the safetensors files of a model folder.

    Raises:
        DamagedFile: a file is missing, truncated or malformed, or lacks a tensor that the index lists.
    """
    files = _weight_files(folder)
    return _weight_headers(folder, tuple(files), versions([*files, folder / INDEX]))


@lru_cache(maxsize=8)  # several rules read the same folder
def _weight_headers(
    folder: Path, files: tuple[Path, ...], version: tuple[tuple[int, int], ...]
) -> dict[str, TensorHeader]:
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        tensors |= read_header(file)
    if len(files) > 1 and (index := folder / INDEX).is_file():
        for name, file_name in _read_index(index).items():
            if name not in tensors:
                raise DamagedFile(f"{file_name} lacks the tensor {name} of {INDEX}")
    return tensors


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Return the name, shape and dtype of every tensor in a safetensors file.

    The file starts with the length of its header in 8 bytes, and the header in JSON.

    Raises:
        DamagedFile: the file is missing, truncated or malformed.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(len(_LFS_POINTER))
            if start == _LFS_POINTER.encode():
                raise DamagedFile(f"{file.name} is a pointer of Git LFS, not the weights; run: git lfs pull")
            stream.seek(8)
            length = int.from_bytes(start[:8], "little")
            if size < 8 or not 0 < length <= _LARGEST_HEADER:
                raise DamagedFile(f"{file.name} is not a safetensors file ({size:,} bytes)")
            if 8 + length > size:
                raise DamagedFile(f"{file.name} is truncated: {size:,} bytes, shorter than its header")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        tensors = {
            name: TensorHeader(tuple(entry["shape"]), entry["dtype"], (file, 8 + length + first, end - first))
            for name, entry in header.items()
            for first, end in [entry["data_offsets"]]
        }
        needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except DamagedFile:
        raise
    except FileNotFoundError:
        raise DamagedFile(f"no {file.name}") from None
    except OSError as error:
        raise DamagedFile(f"{file.name}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise DamagedFile(f"{file.name} is not a safetensors file (its header is malformed)") from None
    if size < needed:
        raise DamagedFile(f"{file.name} is truncated: {size:,} bytes instead of {needed:,}")
    return tensors


# -- tokenizer -------------------------------------------------------------------------------------


def tokenizer_header(folder: Path) -> TokenizerHeader | None:
    """Return the vocabulary and the special tokens of the tokenizer in `folder`.

    A special token is in the result only if the files determine it: for some tokenizer classes, a token that
    no file names has a default in transformers.

    Returns:
        The tokenizer; None if the vocabulary is not in tokenizer.json, but in another format.

    Raises:
        DamagedFile: the folder contains no tokenizer, or one of its files is malformed.
    """
    names = (*TOKENIZER_FILES, "tokenizer_config.json", "special_tokens_map.json", "config.json")
    return _tokenizer_header(folder, versions(folder / name for name in names))


@lru_cache(maxsize=4)  # a vocabulary of 10^5 tokens takes about 0.2 s; a sweep checks the same folder often
def _tokenizer_header(folder: Path, version: tuple[tuple[int, int], ...]) -> TokenizerHeader | None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise DamagedFile("no tokenizer.json")
    settings = _optional(folder / "tokenizer_config.json")
    if not (folder / "tokenizer.json").is_file():
        return None
    stored = read_object(folder / "tokenizer.json")
    try:
        vocabulary, added = stored["model"]["vocab"], stored["added_tokens"]
        if isinstance(vocabulary, list):  # a Unigram model: (token, score) pairs in the order of the ids
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        ids = {**vocabulary, **{each["content"]: each["id"] for each in added}}
        decoder = settings.get("added_tokens_decoder") or {}
        ids |= {token["content"]: int(number) for number, token in decoder.items()}
        largest = max(ids.values())
    except KeyError as error:
        raise DamagedFile(f"tokenizer.json is not a tokenizer (it lacks {error})") from None
    except (TypeError, ValueError, AttributeError):
        raise DamagedFile("tokenizer.json is not a tokenizer (no tokens)") from None
    if not isinstance(largest, int):
        raise DamagedFile("tokenizer.json is not a tokenizer (a token id is not a number)")
    named = {**_optional(folder / "special_tokens_map.json"), **settings}
    if "added_tokens_decoder" in settings:  # special_tokens_map.json is then not read
        named = settings
    defaults = {} if _has_defaults(folder, settings) else dict.fromkeys(SPECIAL)
    special = {key: _content(named[key]) for key in SPECIAL if key in named}
    template = json.dumps(stated, ensure_ascii=False) if (stated := settings.get("chat_template")) else None
    if (file := folder / "chat_template.jinja").is_file():
        template = file.read_text(encoding="utf-8", errors="replace")
    return TokenizerHeader(ids=ids, special={**defaults, **special}, template=template)


def _optional(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


def _content(token: Any) -> str | None:
    """Return the text of a special token, which is a string or an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _has_defaults(folder: Path, settings: dict[str, Any]) -> bool:
    """Return True if the class of the tokenizer may have special tokens that its files do not name."""
    if settings.get("tokenizer_class") not in _GENERIC_CLASSES:
        return True
    kind = _optional(folder / "config.json").get("model_type")
    return kind in _REPLACED_CLASSES or kind not in _UNIFORM


# -- layers ----------------------------------------------------------------------------------------


def missing_tensors(config: dict[str, Any], tensors: dict[str, TensorHeader]) -> list[str]:
    """Return the names of tensors that the weights of a model lack, as far as names alone show it.

    A tensor of one block is expected in all blocks. Only model types whose blocks are alike are checked. A
    causal model of any type needs an output head, if config.json states that no other weight is its head.

    Args:
        config: content of config.json.
        tensors: result of `weight_headers`.
    """
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    own_head = _ties(config) is False and is_causal(config) and embeddings(tensors) is not None
    missing = [HEADS["embed_in" in "".join(tensors)]] if own_head and not _head(tensors) else []
    if config.get("model_type") not in _UNIFORM or not isinstance(layers, int):
        return missing
    found = set(_in_blocks(tensors))
    kinds = sorted({(prefix, rest) for prefix, _, rest in found})
    missing += [
        f"{prefix}.{layer}.{rest}"
        for layer in range(layers)
        for prefix, rest in kinds
        if (prefix, layer, rest) not in found
    ]
    if embeddings(tensors) is None:
        missing.append("the input embeddings")
    return missing


def contradiction(config: dict[str, Any], tensors: dict[str, TensorHeader]) -> str | None:
    """Return a size in config.json that differs from the weights, or None.

    Only model types whose blocks are alike are checked.

    Args:
        config: content of config.json.
        tensors: result of `weight_headers`.
    """
    if config.get("model_type") not in _UNIFORM:
        return None
    found = embeddings(tensors)
    last = max((number, prefix) for prefix, number, _ in [*_in_blocks(tensors), ("", -1, "")])
    sizes = [("num_hidden_layers", "n_layer", last[0] + 1, f"layers (the last is {last[1]}.{last[0]})")]
    if found is not None and len(found.shape) == 2:
        sizes.append(("hidden_size", "n_embd", found.shape[1], "columns in the embeddings"))
        sizes.append(("vocab_size", "vocab_size", found.shape[0], "embeddings"))
    for name, other, size, unit in sizes:
        key = name if name in config else other
        if isinstance(config.get(key), int) and config[key] != size:
            return f"config.json states {key}={config[key]}, and the weights have {size} {unit}"
    return None


def _ties(config: dict[str, Any]) -> Any:
    """Return whether config.json states that the output head is the input embeddings; None: it does not."""
    return {**(config.get("text_config") or {}), **config}.get("tie_word_embeddings")


def _head(tensors: dict[str, TensorHeader]) -> TensorHeader | None:
    return next((tensor for name, tensor in tensors.items() if name.endswith(HEADS)), None)


def has_two_heads(config: dict[str, Any], tensors: dict[str, TensorHeader]) -> bool:
    """Return whether config.json ties the output head to embeddings that have other values than the head.

    transformers then uses the head of the weights, and vLLM the embeddings.
    """
    head, tied = _head(tensors), embeddings(tensors)
    if not _ties(config) or head is None or tied is None:
        return False
    return head != tied or _differ(head.place, tied.place, versions([head.place[0], tied.place[0]]))


@lru_cache(maxsize=8)  # several rules read the same folder
def _differ(one: _Place, other: _Place, version: tuple[tuple[int, int], ...]) -> bool:
    """Return whether two tensors of one shape and dtype have different values."""
    a, b = (np.memmap(file, np.uint16, "r", first, (size // 2,)) for file, first, size in (one, other))
    return not np.array_equal(a, b)


def is_causal(config: dict[str, Any]) -> bool:
    """Return True if config.json names the architecture of a causal language model with its head."""
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures(config))


def architectures(config: dict[str, Any]) -> list[str]:
    """Return the class names in `architectures` of config.json."""
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def embeddings(tensors: dict[str, TensorHeader]) -> TensorHeader | None:
    """Return the input embeddings [vocabulary, hidden size] of a model; None if their name is not known."""
    return next((tensor for name, tensor in tensors.items() if name.endswith(_EMBEDDINGS)), None)


def _in_blocks(tensors: dict[str, TensorHeader]) -> Iterator[tuple[str, int, str]]:
    """Yield the tensors of the blocks as (prefix, number of the block, rest of the name)."""
    for name in tensors:
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if number is not None:
            yield ".".join(parts[:number]), int(parts[number]), ".".join(parts[number + 1 :])


def linear_layers(config: dict[str, Any], tensors: dict[str, TensorHeader]) -> list[str]:
    """Return the names of the linear layers in the blocks of a model, as its weights show them.

    Args:
        config: content of config.json.
        tensors: result of `weight_headers`.

    Returns:
        The full module names; empty if the model type may have other names in transformers than in its files.
    """
    if config.get("model_type") not in _UNIFORM:
        return []
    return [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and len(tensor.shape) == 2 and any(p.isdecimal() for p in name.split("."))
    ]


# The rule that chooses a pad token, and error messages about pad tokens. This module imports no torch.


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
