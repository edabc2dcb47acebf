"""The list of rules over the whole config."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlhf.config.root import Config

Rule = Callable[[Config], Iterator[str]]
