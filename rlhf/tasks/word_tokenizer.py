"""Tokenizers of the embedded tasks: one token a word of the generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


SPECIAL = EOS, PAD, UNK = "<|endoftext|>", "<|padding|>", "<|unknown|>"


def word_tokenizer(vocabulary: Sequence[str], pattern: str) -> PreTrainedTokenizerFast:
    """A tokenizer that cuts texts by the regular expression `pattern` and knows EOS, PAD, UNK and
    `vocabulary`.

    Words are to carry the space before them, so that decoding gives back the very text that was encoded.
    """
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL, *vocabulary]
    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNK))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
