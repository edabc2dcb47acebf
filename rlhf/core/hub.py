"""The Hugging Face hub: models in its cache on this machine, and whether it can be reached. No torch."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread

TIMEOUT_S = 4.0  # the longest time for one answer of the hub


def cached_folder(name: str) -> Path | None:
    """Return the folder of the model `name` in the hub's cache; None if it was not downloaded."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else None


@cache
def tokenizer_folder(name: str) -> Path | None:
    """Return the folder with the tokenizer of the model `name`, downloaded if possible; None: none found."""
    from huggingface_hub import snapshot_download

    with suppress(Exception):  # several kinds; the run reports them when it loads the tokenizer
        return Path(snapshot_download(name, allow_patterns=["token*", "chat*", "special*", "config.json"]))
    return None


def unreachable() -> str | None:
    """Return why nothing can be downloaded from the hub, or None if the hub answers.

    The result comes within about `TIMEOUT_S` seconds; the hub's own client tries for about a minute.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE=1 is set"
    return _no_answer(constants.ENDPOINT)


def _no_answer(address: str) -> str | None:
    """Return why the server at `address` gave no answer, or None; any HTTP status is an answer."""
    found: list[str | None] = []

    def ask() -> None:
        import requests

        try:
            requests.head(address, timeout=TIMEOUT_S)
        except requests.RequestException as error:
            found.append(f"no connection to {address} ({type(error).__name__})")
        else:
            found.append(None)

    # Looking up the name of the host has no timeout of its own.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S + 1)
    return found[0] if found else f"no connection to {address} within {TIMEOUT_S:g} s"
