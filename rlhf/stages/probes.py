"""Probes of a reward: planted responses that must not score like an honest answer, and what they score.

An honest answer is the reference response of an example, in the format of `probes.yaml` that the reward tells
best from the answer to another prompt. N examples; a probe has one response to each, or to some of them.

A reward is a verifier, a similarity to the reference, or a quality that any text can have. So an alarm
depends on whether the reward tells the reference from the answer to another prompt, on 75 % of the examples:

    it does         a probe scores as high as the reference of its example; the reference and more scores
                    above the reference
    it does not     an empty response is as good as the references, or a probe is well above all of them

A verifier, whose wrong answers have one or two scores, is also tried with answers that are nearly right. It
raises an alarm, too, if a response without an answer scores well above a wrong answer. For a judge of pairs,
the score is the points of a response against the reference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rlhf.core.errors import RunError

# Numbers of examples, and a response to each -> their scores
Score = Callable[[Sequence[int], Sequence[str]], np.ndarray]
# The name of a probe, and its kind: `empty` and `none` are no answer, `alone` is a text without the own
# answer, `list` has the own answer among others, `added` is the reference and more, `near` is nearly right
Probe = tuple[str, str]

_GIVEN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("probes.yaml").read_text("utf-8"))
_SAME = 1e-6  # relative difference of equal scores
_TOLD = 0.75  # share of examples, of a reward that tells answers apart
_MOST, _ALWAYS = 0.7, 0.9  # shares of examples of an alarm; the latter for the answer to another prompt
_GAP = 0.25  # part of the difference between reference and wrong answer: well above a wrong answer
_LONG = 2000  # characters of a long text, at least
_OWN, _FOREIGN = ("the reference", "own"), ("the answer to another prompt", "foreign")
_LAST = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?!.*\d)|[^\W\d_]+(?=[\W_]*$)", re.DOTALL)  # number, or else word
# Changes of the last number, or else the last word, to a wrong one that contains it; None: it is not wrong
_NEAR: dict[str, Callable[[str], str | None]] = {
    "with the other sign": lambda n: (n[1:] if n[0] == "-" else f"-{n}") if re.search("[1-9]", n) else None,
    "behind other digits or letters": lambda n: f"7.{n}" if n.isdigit() else f"x{n}" if n.isalpha() else None,
    "before other digits or letters": lambda n: f"{n}x" if n.isalpha() else f"{n}7",
    "cut to its beginning": lambda n: n[0] if n[:2].isalnum() and len(n) > 1 else None,
}


def planted(prompt: str, reference: str, others: Sequence[str], form: str) -> dict[Probe, str]:
    """Return the probes of an example, whose answers have the format `form`; `others` are wrong answers."""
    own, *wrong = (form.replace("{}", each) for each in (reference, *others))
    found = {_OWN: own, **({_FOREIGN: wrong[0]} if wrong else {}), ("an empty response", "empty"): ""}
    found |= {(f"the answer {text!r}", "none"): form.replace("{}", text) for text in ("", *_GIVEN["odd"])}
    found["a copy of the prompt", "alone"] = prompt
    # The right answer is neither the first nor the last one: to read one of these is no fault.
    if others and "\n" not in reference:
        several = f"{others[0]}\n{reference}\n{others[-1]}"
        found["several answers in one", "list"] = form.replace("{}", several)
        found["several answers", "list"] = f"{wrong[0]}\n{own}\n{wrong[-1]}"
    found["the reference ten times", "added"] = "\n".join([own] * 10)
    joined = " ".join(others) + " "
    for name, text in (_GIVEN["texts"] | {"a long text": joined * (1 + _LONG // len(joined))}).items():
        found[name, "alone"] = text
        found[f"{name}, then the reference", "added"] = f"{text}\n{own}"
        found[f"the reference, then {name}", "added"] = f"{own}\n{text}"
    last = _LAST.search(reference)
    for name, change in _NEAR.items():
        if last and (new := change(last[0])):
            changed = reference[: last.start()] + new + reference[last.end() :]
            found[f"the answer {name}", "near"] = form.replace("{}", changed)
    return found


def probed(
    score: Score, prompts: Sequence[str], references: Sequence[str], tolerance: float
) -> Iterator[tuple[str, bool]]:
    """Yield a line for each probe of a reward on N examples, at least 4, and whether it is an alarm.

    Args:
        score: scores one response to each of some examples, or raises RunError.
        prompts, references: N texts each.
        tolerance: largest relative difference of scores that are equal.

    Raises:
        RunError: the reference responses cannot be scored.
    """
    plain = [each.strip().casefold() for each in references]
    distinct = list(dict(zip(plain, references, strict=True)).items())
    turned = [distinct[i % len(distinct) :] + distinct[: i % len(distinct)] for i in range(len(plain))]
    others = [[text for key, text in each if key != own] for each, own in zip(turned, plain, strict=True)]

    def made(form: str) -> list[dict[Probe, str]]:
        return [planted(*each, form) for each in zip(prompts, references, others, strict=True)]

    def tried(every: Sequence[dict[Probe, str]], probe: Probe, part: slice = slice(None)) -> np.ndarray:
        found = np.full(len(every), np.nan)
        if known := [i for i, each in enumerate(every) if probe in each][part]:
            found[known] = score(known, [every[i][probe] for i in known])
        return found

    def told(form: str) -> tuple[int, float]:
        """Return how many of 4 references get another score than a wrong answer; if none, their score."""
        try:
            own, wrong = (tried(made(form)[:4], probe) for probe in (_OWN, _FOREIGN))
        except RunError:
            return -1, 0.0
        count = int((np.abs(own - wrong) > _SAME).sum())
        return count, 0.0 if count else float(own.mean())

    every, found = made(form := max(_GIVEN["formats"], key=told)), dict[str, np.ndarray]()
    for name, kind in {probe: None for each in every for probe in each}:
        try:
            found[kind] = scores = tried(every, (name, kind))
            again = tried(every, (name, kind), slice(None, 0, -1)) if kind in ("own", "foreign") else scores
        except RunError as error:
            if kind == "own":
                raise
            yield f"{name} has no score, so the run would stop: {error}", True
            continue
        if (known := ~np.isnan(scores)).any():
            right, wrong = found["own"], found.get("foreign", found["own"])
            margin = max(tolerance, _SAME) * np.maximum(1, np.abs(right))
            if changed := int((np.abs(again - scores) > margin).sum()):
                of = f"{changed} of {known.sum()} examples: the score depends on chance, time or the batch"
                yield f"{name} has another score if it is scored again in another order, on {of}", True
            high = _too_high(kind, scores, right, wrong, margin)[known]
            its, first, second = (f"{np.nanmedian(each):.4g}" for each in (scores, right, wrong))
            line, least = f"{its:>10}  {name}", (_ALWAYS if kind == "foreign" else _MOST) * len(high)
            if alarm := high.sum() >= least:
                line = (
                    f"{name} scores {its}, {_OWN[0]} {first}, {_FOREIGN[0]} {second} (medians): too high on "
                )
                line += f"{high.sum()} of {len(high)} examples"
            yield line if kind != "own" else f"{line}, as {form!r}", bool(alarm)


def _too_high(
    kind: str, scores: np.ndarray, right: np.ndarray, wrong: np.ndarray, margin: np.ndarray
) -> np.ndarray:
    """Return whether the scores of a probe are too high, [N] bool; False where an example has no probe.

    Args:
        kind: kind of the probe.
        scores, right, wrong: scores [N] of the probe, of the references and of answers to other prompts.
        margin: [N], differences of equal scores.
    """
    if kind in ("own", "foreign"):
        return (scores >= right - margin) & (kind == "foreign")
    apart, others = right - wrong > margin, np.unique(wrong[~np.isnan(wrong)].round(6))
    told, verifies = apart.sum() >= max(1, _TOLD * np.isfinite(wrong).sum()), len(others) <= 2
    if not told:
        if kind == "empty":
            return scores >= np.median(right) - margin
        spread = np.ptp(right) + np.abs(np.median(right)) / 2
        top = right if kind == "added" else right.max()
        return (scores > top + spread + margin) & (kind in ("alone", "added"))
    high = scores > right + margin if kind == "added" else scores >= right - margin
    if verifies and kind in ("empty", "none", "alone"):
        high |= apart & (scores - wrong > _GAP * (right - wrong))
    return high & (verifies or kind != "near")
