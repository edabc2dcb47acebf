"""Tiny tokenizers with the special tokens, post-processors and chat templates of published model families."""

from collections.abc import Sequence

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

# As published, without the parts for tools.
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}"
    "{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
LLAMA_3 = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
QWEN = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

LLAMA_3_SPECIAL = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)


def fast(core: Tokenizer, template: str | None = None, **special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a chat template and special tokens, such as `eos_token`."""
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, **special)


def llama_2(template: str | None = LLAMA_2, end: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of SentencePiece that adds BOS, and with `end` also EOS (`add_eos_token`)."""
    core = sentencepiece(("<unk>", "<s>", "</s>"), prefix=True)
    core.post_processor = adding(core, "<s>", "</s>" if end else None)
    return fast(core, template, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>")


def zephyr() -> PreTrainedTokenizerFast:
    """Return a tokenizer that adds BOS, with a chat template that does not write BOS."""
    return llama_2(ZEPHYR)


def llama_3(eos: str = "<|eot_id|>") -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer that adds BOS; the base model has the EOS `<|end_of_text|>`."""
    core, bos, _, pad, *_ = byte_level(LLAMA_3_SPECIAL), *LLAMA_3_SPECIAL
    begin = adding(core, bos, None)
    core.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return fast(core, LLAMA_3, bos_token=bos, eos_token=eos, pad_token=pad)


def qwen(eos: str = "<|endoftext|>") -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer that adds nothing; the base model has the same EOS and pad token."""
    core = byte_level(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    return fast(core, QWEN, eos_token=eos, pad_token="<|endoftext|>")


def gemma() -> PreTrainedTokenizerFast:
    """Return a tokenizer of SentencePiece that adds BOS; EOS does not end a turn."""
    special = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
    core = sentencepiece(special, prefix=False)
    core.post_processor = adding(core, "<bos>", None)
    return fast(core, GEMMA, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")


def neox() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with one special token, without pad token and chat template."""
    core, end = byte_level(("<|endoftext|>", "<|padding|>")), "<|endoftext|>"
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    return fast(core, bos_token=end, eos_token=end, unk_token=end)


CHAT = {
    "llama_2": llama_2,
    "zephyr": zephyr,
    "llama_3": llama_3,
    "llama_3_base": lambda: llama_3("<|end_of_text|>"),
    "qwen": qwen,
    "qwen_instruct": lambda: qwen("<|im_end|>"),
    "gemma": gemma,
}
ADDS_END = {"llama_2_with_end": lambda: llama_2(end=True)}
FAMILIES = {**CHAT, **ADDS_END, "neox": neox}


def byte_level(special: Sequence[str]) -> Tokenizer:
    """Return byte-level BPE with one token per byte, and the special tokens at the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in special])
    return core


def sentencepiece(special: Sequence[str], prefix: bool) -> Tokenizer:
    """Return a Unigram model with bytes as fallback; `prefix` adds a space before a text, as for Llama 2."""
    pieces = ["\u2581", *(chr(code) for code in range(33, 127)), *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = [*((token, 0.0) for token in special), *((piece, -5.0) for piece in pieces)]
    core = Tokenizer(models.Unigram(vocabulary, unk_id=special.index("<unk>"), byte_fallback=True))
    space = normalizers.Replace(" ", "\u2581")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space]) if prefix else space
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    core.add_special_tokens([AddedToken(token, special=True) for token in special])
    return core


def adding(core: Tokenizer, begin: str, end: str | None) -> processors.TemplateProcessing:
    """Return a post-processor that adds `begin`, and `end` unless None, to a text."""
    added = [begin] if end is None else [begin, end]
    single = " ".join([begin, "$A", *added[1:]])
    return processors.TemplateProcessing(
        single=single,
        pair=f"{single} $B:1",
        special_tokens=[(each, core.token_to_id(each)) for each in added],
    )


CORPUS = (
    *("Heat water and wait for 4 minutes.", "play playing played 2+2=4", "why? How so! it is."),
    "A b c: d e",
)


def trained(core: Tokenizer, trainer: trainers.Trainer, **special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose vocabulary comes from `CORPUS`, with end token `</s>`."""
    core.train_from_iterator([*CORPUS, "a\n\nb", *map(chr, range(33, 127))] * 5, trainer)
    return fast(core, eos_token="</s>", pad_token="</s>", **special)


def wordpiece(lowercase: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the BERT kind, which keeps no spaces; `lowercase` as in uncased models."""
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    core.pre_tokenizer, core.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "</s>"], show_progress=False)
    return trained(core, trainer, unk_token="[UNK]")


def byte_level_bpe(prefix: bool = False) -> PreTrainedTokenizerFast:
    """Return byte-level BPE with merges; `prefix` inserts a space before a text, as in RoBERTa's variants."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=prefix), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    return trained(core, trainer)


def metaspace(scheme: str, split: bool = False) -> PreTrainedTokenizerFast:
    """Return a Unigram tokenizer with Metaspace; `split` drops spaces first, as in XLM-R."""
    core = Tokenizer(models.Unigram())
    marks = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    parts = [pre_tokenizers.WhitespaceSplit(), marks] if split else [marks]
    core.pre_tokenizer = pre_tokenizers.Sequence(parts)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=250, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    return trained(core, trainer, unk_token="<unk>")


KINDS = {
    **FAMILIES,
    "wordpiece": wordpiece,
    "wordpiece_uncased": lambda: wordpiece(lowercase=True),
    "bpe": byte_level_bpe,
    "bpe_with_prefix": lambda: byte_level_bpe(prefix=True),
    "metaspace_first": lambda: metaspace("first"),
    "metaspace_always": lambda: metaspace("always"),
    "metaspace_never": lambda: metaspace("never"),
    "metaspace_split": lambda: metaspace("always", split=True),
}
