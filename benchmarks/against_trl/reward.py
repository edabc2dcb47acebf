"""The reward of asynchronous cases, for both sides. TRL computes it in a process without a GPU."""

from __future__ import annotations


def variety(prompt: str, response: str, reference: str) -> float:
    """Return the share of distinct words in the response."""
    words = response.split()
    return len(set(words)) / max(1, len(words))


def rewards(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    """Return the rewards of completions, each a list of messages, as TRL passes them."""
    return [variety("", messages[-1]["content"], "") for messages in completions]
