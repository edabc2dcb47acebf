"""How numbers, times, intervals, paths and URLs are written, without secrets. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

# Formatting of numbers, times, texts and paths for the terminal.


GAP = "  "  # between two items of a line


def figure(value: float) -> str:
    """Return a number with three decimals below 10 and fewer above, an integer without decimals.

    A number that rounds to zero is "0.000", without a sign, so that rounding noise is not shown.
    """
    if isinstance(value, int):
        return f"{value:,}"
    decimals = sum(abs(value) < limit for limit in (9.9995, 99.995, 999.95))
    return f"{value:z,.{decimals}f}"


def clock(seconds: float) -> str:
    """Return a duration as m:ss, or as h:mm:ss from one hour on."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def fitting(items: Iterable[str], width: int, gap: str = GAP) -> str:
    """Return the first items, joined by `gap`, that fit in `width` columns together."""
    line = ""
    for item in items:
        longer = f"{line}{gap}{item}" if line else item
        if len(longer) > width:
            break
        line = longer
    return line


def lines_of(items: Iterable[str], width: int, indent: str = "") -> list[str]:
    """Return lines of at most `width` columns with all items; no item is divided between two lines.

    Args:
        items: texts, which two spaces separate.
        width: the number of columns. A longer item has a line of its own.
        indent: text at the beginning of every line but the first.
    """
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(GAP) + len(item) <= width:
            lines[-1] += GAP + item
        else:
            lines.append((indent if lines else "") + item)
    return lines


def printable(text: str) -> str:
    """Return `text` with escapes for line breaks and other characters that cannot be printed."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, width: int, *, end: bool = False) -> str:
    """Return `text` on one line of at most `width` characters, cut between words and marked with "...".

    White space becomes single blanks, and characters that cannot be printed become "?".

    Args:
        text: any text.
        width: the largest number of characters.
        end: keep the end of the text instead of its beginning.
    """
    if end:
        return shortened(text[::-1], width)[::-1]
    line = " ".join("".join(c if c.isprintable() or c.isspace() else "?" for c in text).split())
    if len(line) <= width:
        return line
    room = width - len(" ...")
    kept = fitting(line.split(" "), room, " ") or line[:room]  # else a long word, as a sentence in Chinese
    return f"{kept} ..."


def short_path(path: Path) -> str:
    """Return a path as text, relative to the current folder if it is below that folder."""
    path = path.expanduser()
    below = path.is_absolute() and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd()) if below else path)


# Scores and rewards that user code returns.


_MOST = 3.4028234663852886e38  # the largest float32


def as_score(value: object) -> float | None:
    """Return a score from user code as a float; None if `value` is no number, or not finite in float32.

    A number of the type float32 means the decimal that it is printed as, so that equal sums can tie.
    """
    if isinstance(value, str | bytes):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]  # float() accepts any number type
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    if not abs(number) <= _MOST:  # NaN, too
        return None
    return in_float32(number) if str(getattr(value, "dtype", "")).endswith("float32") else number


def in_float32(number: float) -> float:
    """Return the shortest decimal that is rounded to the same float32 as `number`."""
    import numpy as np  # here, because mistakes and `--help` need no numpy

    return float(str(np.float32(number)))


def not_a_score(value: object) -> str:
    """Return, for a message about a value that is no score, the limit of float32 if `value` exceeds it."""
    beyond = isinstance(value, int | float) and _MOST < abs(value) < math.inf
    return " below 3.4e38, the limit of float32" if beyond else ""


# 95 % confidence intervals of measured probabilities and means.


_Z95 = 1.959963984540054  # 95 % of the standard normal distribution lies between -Z95 and Z95


def wilson(part: float, count: int, z: float = _Z95) -> tuple[float, float]:
    """Return the Wilson score interval (Wilson 1927) of a probability.

    Unlike part +- z sqrt(part (1 - part) / count), the interval lies in [0, 1], and its width is not zero if
    all trials or no trials succeeded.

    Args:
        part: fraction of the trials that succeeded.
        count: number of independent trials.
        z: quantile of the standard normal distribution; the default gives a 95 % interval.

    Returns:
        Lower and upper bound; (0, 1) without trials.
    """
    if count < 1:
        return 0.0, 1.0
    centre = (part + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(part * (1 - part) / count + (z / (2 * count)) ** 2)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_bounds(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % normal interval of a mean, mean -+ 1.96 s / sqrt(n).

    Args:
        values: n independent values with the standard deviation s.

    Returns:
        None for fewer than two values, from which s cannot be estimated.
    """
    if len(values) < 2:
        return None
    centre = math.fsum(values) / len(values)
    variance = math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)
    half = _Z95 * math.sqrt(variance / len(values))
    return centre - half, centre + half


def with_bounds(name: str, value: float, interval: tuple[float, float] | None) -> dict[str, float]:
    """Return a metric, and the bounds of its interval, if any, as `<name>_low` and `<name>_high`."""
    if interval is None:
        return {name: value}
    return {name: value, f"{name}_low": interval[0], f"{name}_high": interval[1]}


def rate(name: str, part: float, count: int) -> dict[str, float]:
    """Return a metric that is a fraction of `count` trials, with the bounds of its 95 % interval."""
    return with_bounds(name, part, wilson(part, count))


def bounds(row: Mapping[str, float], name: str) -> tuple[float, float] | None:
    """Return the bounds of the interval of the metric `name` in a row of metrics; None without an interval.

    Rows of earlier versions have half the width of the interval instead, as `<name>_ci95`.
    """
    if f"{name}_low" in row:
        return row[f"{name}_low"], row[f"{name}_high"]
    half = row.get(f"{name}_ci95")
    return None if half is None else (row[name] - half, row[name] + half)


def text(row: Mapping[str, float], name: str) -> str:
    """Return the metric `name` of a row with its interval, if any, as text; empty if it is not in the row."""
    if name not in row:
        return ""
    interval = bounds(row, name)
    if interval is None:
        return figure(row[name])
    bounds_of = [  # with fewer digits than `figure` outside the range of a share
        figure(x) if -0.1 < x <= 1 or abs(x) >= 99.95 else f"{x:.{2 if abs(x) < 9.995 else 1}f}"
        for x in interval
    ]
    return f"{figure(row[name])} [{', '.join(bounds_of)}]"


# Secrets in URLs, in arguments and in text: where they are, and the text without them.


HIDDEN = "<redacted>"

_KEY = re.compile(
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
_TOKEN = re.compile(  # tokens of Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, and JSON web tokens
    r"\b(hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|xox[abprs]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|eyJ[\w-]{8,}\.[\w-]+\.[\w-]+)"
)


def is_secret_key(key: str) -> bool:
    """Return whether a key, such as `logger.api_key`, names a secret."""
    return _KEY.search(key.lstrip("+~-")) is not None and not key.endswith(_NO_SECRETS)


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
        for name, value in [*parse_qsl(parsed.query), *parse_qsl(parsed.fragment)]:
            if _PARAMETER.search(name) or _RANDOM.fullmatch(value):
                return f"a secret in its query (the parameter {name})"
    return "a token" if _TOKEN.search(text) else None


def hide(text: str) -> str:
    """Return a text, such as a message or an argument, without the secrets that it shows."""
    text = _CREDENTIALS.sub(HIDDEN, text)

    def parameter(found: re.Match[str]) -> str:
        name, value = found.groups()
        return f"{name}={HIDDEN}" if _PARAMETER.search(name) or _RANDOM.fullmatch(value) else found[0]

    def assignment(found: re.Match[str]) -> str:
        key, value = found.groups()
        secret = is_secret_key(key) and not NO_SECRET_VALUE.fullmatch(value)
        return f"{key}={HIDDEN}" if secret else found[0]

    text = _ASSIGNED.sub(assignment, _QUERY.sub(parameter, text))
    return _TOKEN.sub(HIDDEN, text)
