"""What the files of a local model folder state, read without loading the model. This module imports no torch.

The header of a safetensors file lists the names, shapes and dtypes of its tensors; tokenizer.json lists the
vocabulary. Reading both takes well below a second for models of any size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf.core.errors import setting

_LFS_POINTER = "version https://git-lfs"  # begin of a file that stands for a large file in a Git repository
INDEX = "model.safetensors.index.json"  # tensor -> file, for weights in several files
# Files from which transformers builds a tokenizer, most common first.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "tiktoken.model",
)  # fmt: skip
# Tokenizer classes without special tokens of their own. Other classes have defaults, such as </s> for Llama.
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Model types for which transformers replaces a generic class by a class with special tokens of its own.
_REPLACED_CLASSES = ("qwen2", "phi3")
# Model types whose blocks all have the same tensors, under the names of the modules in transformers.
_UNIFORM = (
    "llama", "mistral", "gpt_neox", "gpt2", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "olmo2",
)  # fmt: skip
_SPECIAL = ("eos_token", "pad_token", "bos_token")  # keys of special tokens in the files of a tokenizer
_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight")  # ends of names of input embeddings
_HEADS = ("lm_head.weight", "embed_out.weight")  # names of output heads
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")  # context length in config.json
_ENCODERS = (  # model types that read a text in both directions, unless config.json has is_decoder
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet",
    "roberta", "xlm-roberta",
)  # fmt: skip
_NO_CAUSAL_HEAD = ("ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering")  # ends of class names


class DamagedFile(ValueError):
    """A file of a model folder is missing, truncated or malformed. The message names file and defect."""


@dataclass(frozen=True, slots=True)
class _TensorHeader:
    """A tensor of a safetensors file."""

    shape: tuple[int, ...]
    dtype: str  # as in the file, for example "F32" or "BF16"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerHeader:
    """The vocabulary and the special tokens of a tokenizer."""

    ids: dict[str, int]  # token -> id
    special: dict[str, str | None]  # key of `_SPECIAL` -> token; a key is missing if no file determines it
    template: str | None  # the chat template; several templates as one text

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
    except OSError as error:
        defect = f"{file.name}: {error.strerror}" if file.exists() else f"no {file.name}"
        raise DamagedFile(defect) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DamagedFile(f"{file.name} is not a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise DamagedFile(f"{file.name} is not a JSON object")
    return found


def read_header(file: Path) -> dict[str, _TensorHeader]:
    """Return the name, shape and dtype of every tensor in a safetensors file.

    Raises:
        DamagedFile: the file is missing, truncated or malformed.
    """
    from safetensors import SafetensorError, safe_open  # here, because mistakes need no such library

    try:
        with file.open("rb") as stream:
            if stream.read(len(_LFS_POINTER)) == _LFS_POINTER.encode():
                raise DamagedFile(f"{file.name} is a pointer of Git LFS, not the weights; run: git lfs pull")
        with safe_open(file, "np") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
            return {n: _TensorHeader(tuple(x.get_shape()), x.get_dtype()) for n, x in slices.items()}
    except FileNotFoundError:
        raise DamagedFile(f"no {file.name}") from None
    except OSError as error:
        raise DamagedFile(f"{file.name}: {error.strerror or error}") from None
    except SafetensorError as error:
        reason = str(error).rpartition("header: ")[2]
        raise DamagedFile(
            f"{file.name} is truncated or no safetensors file: {file.stat().st_size:,} bytes ({reason})"
        ) from None


def _read_weights(folder: Path) -> dict[str, _TensorHeader]:
    """Return the tensors in the safetensors files from which transformers loads the model in `folder`.

    Raises:
        DamagedFile: a file is missing, truncated or malformed, or lacks a tensor that the index lists.
    """
    index = folder / INDEX
    if (folder / "model.safetensors").is_file():
        return read_header(folder / "model.safetensors")
    if not index.is_file():
        if any(folder.glob("*.safetensors")):
            raise DamagedFile(f"neither model.safetensors nor {INDEX}")
        patterns = ("*.bin", "*.pt", "*.pth", "*.h5")
        other = next((file.name for pattern in patterns for file in folder.glob(pattern)), None)
        only = f", only {other}" if other else ""
        raise DamagedFile(f"no *.safetensors{only}; reading other formats can execute code")
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise DamagedFile(f"{INDEX} has no weight_map of tensors and files")
    tensors: dict[str, _TensorHeader] = {}
    for name in sorted(set(names.values())):
        tensors |= read_header(folder / name)
    for name, file in names.items():
        if name not in tensors:
            raise DamagedFile(f"{file} lacks the tensor {name} of {INDEX}")
    return tensors


def _read_tokenizer_header(folder: Path) -> TokenizerHeader | None:
    """Return the vocabulary and the special tokens of the tokenizer in `folder`.

    A special token is in the result only if the files determine it: for some tokenizer classes, a token that
    no file names has a default in transformers.

    Returns:
        The tokenizer; None if the vocabulary is not in tokenizer.json, but in another format.

    Raises:
        DamagedFile: the folder contains no tokenizer, or one of its files is malformed.
    """

    def optional(name: str) -> dict[str, Any]:
        return read_object(folder / name) if (folder / name).is_file() else {}

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise DamagedFile("no tokenizer.json")
    settings = optional("tokenizer_config.json")
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
    # With added_tokens_decoder, special_tokens_map.json is not read.
    named = settings if "added_tokens_decoder" in settings else optional("special_tokens_map.json") | settings
    kind = optional("config.json").get("model_type")
    generic = settings.get("tokenizer_class") in _GENERIC_CLASSES
    complete = generic and kind in _UNIFORM and kind not in _REPLACED_CLASSES
    special = dict.fromkeys(_SPECIAL) if complete else {}
    for key in _SPECIAL:
        if key in named:
            special[key] = named[key].get("content") if isinstance(named[key], dict) else named[key]
    template = json.dumps(stated, ensure_ascii=False) if (stated := settings.get("chat_template")) else None
    if (file := folder / "chat_template.jinja").is_file():
        template = file.read_text(encoding="utf-8", errors="replace")
    return TokenizerHeader(ids=ids, special=special, template=template)


@cache
def _model_types() -> tuple[frozenset[str], frozenset[str]]:
    """Return the model types of the installed transformers, and those with a causal language model.

    A set is empty if its files have an unknown layout. The source is searched for strings, because importing
    transformers takes seconds.
    """
    found = find_spec("transformers")
    folder = Path(found.origin).parent / "models" / "auto" if found and found.origin else Path("nowhere")

    def read(*names: str) -> str:
        files = (folder / name for name in names)
        return "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())

    table = read("modeling_auto.py").partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")[2]
    known = frozenset(re.findall(r'"([\w.-]+)"', read("auto_mappings.py", "configuration_auto.py")))
    causal = frozenset(re.findall(r'\(\s*"([\w.-]+)"', table.partition("MAPPING_NAMES")[0]))
    nothing: frozenset[str] = frozenset()
    return known if "llama" in known else nothing, causal if "llama" in causal else nothing


class ModelFacts:
    """What the content of a config.json states.

    Attributes:
        config: the content; empty if the file is missing or damaged.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        text = config.get("text_config")
        self._parts = (config, text if isinstance(text, dict) else {})
        names = config.get("architectures")
        self.architectures = [str(name) for name in names] if isinstance(names, list) else []
        self.uniform = config.get("model_type") in _UNIFORM  # the names of the tensors are known
        # The class name of the model for messages; if config.json names none, the model type
        self.name = ", ".join(self.architectures) or str(config.get("model_type"))
        self.is_causal = self._named("ForCausalLM", "LMHeadModel")  # with its head
        self.is_classifier = self._named("ForSequenceClassification")
        rows = self._stated("vocab_size")
        self.vocabulary = rows if isinstance(rows, int) else None  # rows of the embeddings; None: not stated
        lengths = (part.get(name) for part in self._parts for name in _CONTEXT_KEYS)
        # The context length in tokens; None: not stated
        self.context = next((length for length in lengths if isinstance(length, int)), None)

    def _stated(self, key: str) -> Any:
        return next((part[key] for part in self._parts if key in part), None)

    def _named(self, *ends: str) -> bool:
        return any(name.endswith(ends) for name in self.architectures)

    @property
    def original_context(self) -> int | None:
        """The shortest original context length, in tokens, of a rope_type=longrope; None: there is none."""
        original, found = "original_max_position_embeddings", []
        for part in self._parts:
            whole = part.get("rope_parameters") or part.get("rope_scaling")
            for rope in (whole, *whole.values()) if isinstance(whole, dict) else ():  # layers may differ
                if isinstance(rope, dict) and "longrope" in (rope.get("rope_type"), rope.get("type")):
                    lengths = (part.get(original), rope.get(original), ModelFacts(part).context)
                    found += [length for length in lengths if isinstance(length, int)][:1]
        return min(found, default=None)

    @property
    def unknown_type(self) -> str | None:
        """The model type if the installed transformers does not know it, else None."""
        kind, known = self.config.get("model_type"), _model_types()[0]
        return None if not kind or not known or kind in known else str(kind)

    def not_causal(self) -> str | None:
        """Return why the model is no causal language model, or None."""
        config = self.config
        if self.is_classifier:
            return f"a sequence classifier ({self.name}), as reward models are"
        if config.get("is_encoder_decoder") or "decoder_start_token_id" in config:
            return f"an encoder-decoder ({self.name})"
        encodes = config.get("model_type") in _ENCODERS and not config.get("is_decoder")
        if encodes or self._named(*_NO_CAUSAL_HEAD):
            return f"an encoder ({self.name})"
        kind, (known, causal) = str(config.get("model_type")), _model_types()
        if kind not in known or not causal or kind in causal or "auto_map" in config:
            return None
        media = [part for part in ("vision", "audio") if f"{part}_config" in config]
        what = f"a model of {' and '.join([*media, 'language'])}" if media else "a model of another kind"
        if not media and self._named("ForConditionalGeneration"):
            what = "an encoder-decoder"
        return f"{what} ({self.name})"


class ModelFolder(ModelFacts):
    """What the files of a model folder state. No tensor is loaded; `opened` reads each file once.

    Attributes:
        path: the folder.
        tensors: name -> header of the weights; empty if a file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, _TensorHeader] = {}
        self._unreadable: str | None = None
        config: dict[str, Any] = {}
        try:
            config = read_object(path / "config.json")
            self.tensors = _read_weights(path)
        except DamagedFile as error:
            self._unreadable = str(error)
        super().__init__(config)
        found = self.tensors.items()
        self._head = next((name for name, _ in found if name.endswith(_HEADS)), None)
        self._embeddings = next((name for name, _ in found if name.endswith(_EMBEDDINGS)), None)

    @cached_property
    def defect(self) -> str | None:
        """What is missing, damaged or contradictory in config.json and the weights; None: nothing."""
        if not (self.path / "config.json").is_file() and (gguf := next(self.path.glob("*.gguf"), None)):
            return f"no config.json, only {gguf.name}"
        if self._unreadable:
            return self._unreadable
        if not self.config.get("model_type"):
            return "config.json has no model_type"
        dtype = self.tensors[self._embeddings].dtype if self._embeddings else "F32"
        if not dtype.startswith(("F", "BF")):
            return f"the weights are integers ({dtype}); only float weights can be trained"
        if missing := self._missing_tensors():
            return f"the weights lack {', '.join(missing[:3])}"
        return self._contradiction()

    def _blocks(self) -> Iterator[tuple[str, int, str]]:
        """Yield the tensors of the blocks as (prefix, number of the block, rest of the name)."""
        for name in self.tensors:
            if found := re.fullmatch(r"(?:(.*?)\.)?(\d+)(?:\.(.*))?", name):
                yield found[1] or "", int(found[2]), found[3] or ""

    def _missing_tensors(self) -> list[str]:
        """Return the names of tensors that the weights lack, as far as names alone show it.

        A tensor of one block is expected in all blocks of uniform model types. A causal model of any type
        needs an output head, if config.json states that no other weight is its head.
        """
        own_head = self._stated("tie_word_embeddings") is False and self.is_causal and self._embeddings
        missing = []
        if own_head and self._head is None:
            missing.append(_HEADS["embed_in" in str(self._embeddings)])
        layers = self.config.get("num_hidden_layers", self.config.get("n_layer"))
        if not self.uniform or not isinstance(layers, int):
            return missing
        found = set(self._blocks())
        kinds = sorted({(prefix, rest) for prefix, _, rest in found})
        each = ((prefix, layer, rest) for layer in range(layers) for prefix, rest in kinds)
        missing += [f"{block[0]}.{block[1]}.{block[2]}" for block in each if block not in found]
        return missing if self._embeddings else [*missing, "the input embeddings"]

    def _contradiction(self) -> str | None:
        """Return a size in config.json that differs from the weights of a uniform model type, or None."""
        if not self.uniform:
            return None
        last, prefix = max([(number, prefix) for prefix, number, _ in self._blocks()], default=(-1, ""))
        sizes = [("num_hidden_layers", "n_layer", last + 1, f"layers (the last is {prefix}.{last})")]
        if self._embeddings and len(shape := self.tensors[self._embeddings].shape) == 2:
            sizes.append(("hidden_size", "n_embd", shape[1], "columns in the embeddings"))
            sizes.append(("vocab_size", "vocab_size", shape[0], "embeddings"))
        for name, other, size, unit in sizes:
            key = name if name in self.config else other
            if isinstance(self.config.get(key), int) and self.config[key] != size:
                return f"config.json states {key}={self.config[key]}, and the weights have {size} {unit}"
        return None

    def not_reward(self) -> str | None:
        """Return why the model is no reward model, or None.

        A reward model is a sequence classifier with one label and a head with the name `score`.
        """
        head = self.tensors.get("score.weight")
        if self.is_causal and head is None:
            return f"a causal language model ({self.name}) without score.weight"
        names = self.config.get("id2label")  # transformers' default are 2 labels
        stated = len(names) if isinstance(names, dict) else int(self.config.get("num_labels", 2))
        for labels in (1 if head is None else head.shape[0], stated):
            if labels != 1:
                return f"a model with {labels} labels"
        return None if head is not None or not self.tensors else "a model without score.weight"

    def linear_layers(self) -> list[str]:
        """Return the names of the linear layers in the blocks, as the weights show them.

        Returns:
            The full module names; empty if the model type may have other names in transformers than in its
            files.
        """
        return [
            name.removesuffix(".weight")
            for name, tensor in self.tensors.items()
            if self.uniform and re.search(r"(^|\.)\d+\.(.*\.)?weight$", name) and len(tensor.shape) == 2
        ]

    @cached_property
    def _tokenizer(self) -> tuple[TokenizerHeader | None, str | None]:
        try:
            return _read_tokenizer_header(self.path), None
        except DamagedFile as error:
            return None, str(error)

    @property
    def tokenizer(self) -> TokenizerHeader | None:
        """The tokenizer; None if its files do not show it."""
        return self._tokenizer[0]

    @property
    def tokenizer_defect(self) -> str | None:
        """What is missing or damaged in the files of the tokenizer, or None."""
        return self._tokenizer[1]


def opened(folder: Path) -> ModelFolder:
    """Return what the files of a folder state. Files are read again only if a file of the folder changed."""
    states = [(file.name, file.stat()) for file in sorted(folder.glob("*")) if file.is_file()]
    return _opened(folder, tuple((name, state.st_mtime_ns, state.st_size) for name, state in states))


@lru_cache(maxsize=8)  # several rules, and the jobs of a sweep, read the same folders
def _opened(folder: Path, version: tuple[tuple[str, int, int], ...]) -> ModelFolder:
    return ModelFolder(folder)


# The rule that chooses a pad token, and error messages about pad tokens.


# Tokens that models reserve for padding, best first.
_PAD_TOKENS = (
    "<|padding|>", "<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|pad|>", "<|pad_token|>",
    "<|PAD_TOKEN|>", "<|dummy_0|>",
)  # fmt: skip
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
_UNKNOWN = "<unk>"
_END_OF_TEXT = "<|endoftext|>"  # ends a document in pre-training; chats often end with another token
_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}  # the tokens of single bytes in SentencePiece
# The tokens of single bytes in byte-level BPE.
_BYTE_LEVEL = {chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 324))}


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
        candidates.append(_UNKNOWN)
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
