"""Secrets in URLs, in arguments and in text: where they are, and the text without them.

This module imports no torch.
"""

from __future__ import annotations

import re
from urllib.parse import SplitResult, parse_qsl, urlsplit

HIDDEN = "<redacted>"

KEY = re.compile(
    r"(^|[._-])((access|auth|api|secret|private)_?key|((access|auth|api)_?)?(token|secret|password|passwd|credential))s?$",
    re.I,
)
_NO_SECRETS = ("pad_token", "eos_token", "bos_token", "max_prompt_tokens")  # ends of keys that are no secrets
NO_SECRET_VALUE = re.compile(r"[-+.\d]*|null|true|false|<.*", re.I)  # numbers, placeholders of messages
_PARAMETER = re.compile(r"key|token|secret|passw|pwd|auth|credential|^sig|^code$|session", re.I)  # of a query
_RANDOM = re.compile(r"(?=.*[a-z])(?=.*\d)[\w.~+/=-]{16,}", re.I)  # a value that looks like random characters

_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s'\"]+(?=@)")  # user name and password of a URL
_QUERY = re.compile(r"(?<=[?&#])([\w.-]+)=([^&#\s'\"]+)")  # a parameter of a URL
_ASSIGNED = re.compile(r"(?<![\w.?&#-])([\w.@/+~-]+)=([^\s,;()\[\]{}'\"]+)")  # key=value
TOKEN = re.compile(  # tokens of Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, and JSON web tokens
    r"\b(hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|eyJ[\w-]{8,}\.[\w-]+\.[\w-]+)"
)


def is_secret_key(key: str) -> bool:
    """Return whether a key, such as `logger.api_key`, names a secret."""
    return KEY.search(key.lstrip("+~-")) is not None and not key.endswith(_NO_SECRETS)


def secret_in(text: str) -> str | None:
    """Return what the secret in a value is, in words; None if the value shows none.

    Args:
        text: a value of the config, such as a URL or the name of a model.
    """
    for url in re.findall(r"\w+://\S+", text):
        try:
            parsed = urlsplit(url)
        except ValueError:
            continue
        if parsed.username is not None:
            return "a user name or password"
        if (name := _secret_parameter(parsed)) is not None:
            return f"a secret in its query (the parameter {name})"
    return "a token" if TOKEN.search(text) else None


def _secret_parameter(url: SplitResult) -> str | None:
    """Return the name of the first parameter of a URL that looks like a secret; None: there is none."""
    for part in (url.query, url.fragment):
        for name, value in parse_qsl(part):
            if _PARAMETER.search(name) or _RANDOM.fullmatch(value):
                return name
    return None


def hide(text: str) -> str:
    """Return a text, such as a message or an argument, without the secrets that it shows."""
    text = _CREDENTIALS.sub(HIDDEN, text)
    text = _QUERY.sub(_hide_parameter, text)
    text = _ASSIGNED.sub(_hide_value, text)
    return TOKEN.sub(HIDDEN, text)


def _hide_parameter(match: re.Match[str]) -> str:
    """Return a parameter of a URL, without its value if it looks like a secret."""
    name, value = match.groups()
    return f"{name}={HIDDEN}" if _PARAMETER.search(name) or _RANDOM.fullmatch(value) else match[0]


def _hide_value(match: re.Match[str]) -> str:
    """Return `key=value`, without the value if the key names a secret."""
    key, value = match.groups()
    return f"{key}={HIDDEN}" if is_secret_key(key) and not NO_SECRET_VALUE.fullmatch(value) else match[0]
