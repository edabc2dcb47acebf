"""The tokenizer of the embedded tasks: one token per word of the generated texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = EOS, PAD, UNK = "<|endoftext|>", "<|padding|>", "<|unknown|>"


def word_tokenizer(vocabulary: Sequence[str], pattern: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word.

    Args:
        vocabulary: the words, in the order of their token ids after EOS, PAD and UNK. A word should include
            the space before it, so that decoding returns exactly the encoded text.
        pattern: regular expression that matches one word of a text.
    """
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL, *vocabulary]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
