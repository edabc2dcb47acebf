"""Probes of a reward: planted responses that must not score like an honest answer, and what they score.

An honest answer is the reference response of an example, in the format of `probes.yaml` that the reward tells
best from the answer to another prompt. N examples; a probe has one response to each, or to some of them.

A reward is a verifier, a similarity to the reference, or a quality that any text can have. So an alarm
depends on whether the reward tells the reference from the answer to another prompt, on 75 % of the examples
(on any example, if all references have the same score):

    it does         a probe scores as high as the reference of its example; the reference and more scores
                    above the reference
    it does not     an empty response is as good as the references, or a probe is well above all of them

An empty response is also an alarm if it scores well above a wrong answer. Wrong and empty answers have one or
two scores by a verifier, and the lower step is not the larger one. A verifier is also tried with answers that
are nearly right, and raises an alarm, too, if a text without an answer scores well above a wrong answer. For
a judge of pairs, the score is the points of a response against the reference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rlhf.config.schema import data_file
from rlhf.core.batch import Prompts
from rlhf.core.errors import RunError
from rlhf.core.statistics import Estimate, bounded_interval
from rlhf.scorers.judge import JudgeScorer, Question, shown_prompts
from rlhf.text.chat import unquoted

Line = tuple[str, bool]  # a text, and whether it is an alarm
Scores = np.ndarray  # [N]; nan where an example has none
Score = Callable[[Sequence[int], Sequence[str]], Scores]  # numbers of examples, a response to each -> scores
# The name of a probe, and its kind: `empty` and `none` are no answer, `alone` is a text without the own
# answer, `list` has the own answer among others, `added` is the reference and more, `near` is nearly right
Probe = tuple[str, str]

_GIVEN: dict[str, Any] = data_file("rlhf.stages", "probes.yaml")
_SAME = 1e-6  # relative difference of equal scores
# Shares of examples: of a reward that tells answers apart; of an alarm; of that for a foreign answer
_TOLD, _MOST, _ALWAYS = 0.75, 0.7, 0.9
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
    if others:
        lines = [each.rstrip().rpartition("\n")[2] for each in (others[0], reference, others[-1])]
        found["several answers in one", "list"] = form.replace("{}", "\n".join(lines))
        found["several answers", "list"] = "\n".join(form.replace("{}", each) for each in lines)
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


def probed(score: Score, prompts: list[str], references: list[str], tolerance: float) -> Iterator[Line]:
    """Yield a line for each probe of a reward on N examples.

    Args:
        score: scores one response to each of some examples, or raises RunError.
        prompts, references: N texts each.
        tolerance: largest relative difference of scores that are equal.

    Raises:
        RunError: the reference responses cannot be scored.
    """
    N, plain = len(references), [each.strip().casefold() for each in references]
    others = [[references[j] for j in (*range(i, N), *range(i)) if plain[j] != plain[i]] for i in range(N)]

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
        right, wrong = found["own"], found.get("foreign", found["own"])
        margin, known = max(tolerance, _SAME) * np.maximum(1, np.abs(right)), ~np.isnan(scores)
        if changed := int((np.abs(again - scores) > margin).sum()):
            of = f"{changed} of {known.sum()} examples: the score depends on chance, time or the batch"
            yield f"{name} has another score if it is scored again in another order, on {of}", True
        high = _too_high(kind, scores, right, wrong, found.get("empty", wrong), margin)[known]
        its, first, second = (f"{np.nanmedian(each):.4g}" for each in (scores, right, wrong))
        line = f"{its:>10}  {name}" if kind != "own" else f"{its:>10}  {name}, as {form!r}"
        if alarm := bool(high.sum() >= (_ALWAYS if kind == "foreign" else _MOST) * len(high)):
            line = f"{name} scores {its}, {_OWN[0]} {first}, {_FOREIGN[0]} {second} (medians): too high on "
        yield f"{line}{high.sum()} of {len(high)} examples" if alarm else line, alarm


def _too_high(
    kind: str, scores: Scores, right: Scores, wrong: Scores, empty: Scores, margin: Scores
) -> Scores:
    """Return whether the scores of a probe are too high, [N] bool; False where an example has no probe.

    Args:
        kind: kind of the probe.
        scores, right, wrong, empty: scores of the probe, of the references, of answers to other prompts, and
            of empty responses.
        margin: differences of equal scores.
    """
    if kind in ("own", "foreign"):
        return (scores >= right - margin) & (kind == "foreign")
    apart, others = right - wrong > margin, np.r_[wrong, empty]
    least = 0 if np.ptp(right) == 0 else _TOLD * np.isfinite(wrong).sum()
    told, verifies = apart.sum() >= max(1, least), len(np.unique(others[~np.isnan(others)].round(6))) <= 2
    verifies &= np.nanmedian(wrong - empty) <= np.nanmedian(right - wrong)
    if not told:
        if kind == "empty":
            return scores >= np.median(right) - margin
        spread = np.ptp(right) + np.abs(np.median(right)) / 2
        top = right if kind == "added" else right.max()
        return (scores > top + spread + margin) & (kind in ("alone", "added"))
    high = scores > right + margin if kind == "added" else scores >= right - margin
    if kind == "empty" or (verifies and kind in ("none", "alone")):
        high |= apart & (scores - wrong > _GAP * (right - wrong))
    return high & (verifies or kind != "near")


# A judge before a run: N pairs of responses, each shown in both orders, and all questions twice.


def agreement(verdicts: np.ndarray, compares: bool = True) -> dict[str, Estimate]:
    """Return figures of a judge as means with intervals; pairs are independent, answers about a pair are not.

        position bias   share of comparisons that the response shown first won, minus share that it lost
        consistency     share of pairs with the same verdict in both orders
        repetition      share of questions with the same verdict when they are asked again
        separation      share of pairs of answers (to both orders, or to a repeated question) that name the
                        same response, minus share of those that name different ones
        first           share of pairs that the first response won in both orders; undecided pairs are half

    Args:
        verdicts: [passes, orders, N]; 1: the first response won, -1: it lost, 0: tie, nan: there is none.
        compares: whether the judge sees both responses; otherwise, both orders are the same questions.
    """
    y = verdicts[:, :, ~np.isnan(verdicts).any((0, 1))]
    forth, back = y.mean(0 if compares else 1)
    decided = np.where(y[:, 0] == y[:, 1], y[:, 0], 0).mean(0)
    return {
        "position bias": bounded_interval((y[:, 0] - y[:, 1]).mean(0) / 2, -1, 1),
        "consistency": bounded_interval((y[:, 0] == y[:, 1]).mean(0), 0, 1),
        "repetition": bounded_interval((y[0] == y[1]).mean(0), 0, 1),
        "separation": bounded_interval(forth * back, -1, 1),
        "first": bounded_interval((1 + decided) / 2, 0, 1),
    }


def judged(judge: JudgeScorer, prompts: Prompts, pairs: list[tuple[str, str]], better: str) -> Iterator[Line]:
    """Yield lines about a judge; one that contradicts itself is refused.

    Args:
        judge: a judge without a file of judgements.
        prompts: N prompts.
        pairs: N pairs of responses.
        better: what the first response of each pair is.

    Raises:
        RunError: the server does not answer as it must, or too many answers are no verdict.
    """

    def both(pairs: list[tuple[str, str]]) -> np.ndarray:
        """Return the verdicts [2, N] on the pairs in both orders; see `agreement`."""
        if not judge.config.compares:
            scores = judge.group_scores(prompts, pairs).numpy()
            return np.sign([scores[:, 0] - scores[:, 1]] * 2)
        rows = shown_prompts(prompts), pairs, map(unquoted, prompts.references)
        asked = [Question(*each) for each in zip(*rows, strict=True)]
        turned = [each.of(*each.responses[::-1]) for each in asked]
        found = judge.readings([*asked, *turned])
        signs = {each: np.sign(read[0] - read[1]) if read else np.nan for each, read in found.items()}
        return np.array([[signs[each] for each in asked], [-signs[each] for each in turned]])

    passes = [both(pairs)]
    judge.known.clear()  # it is asked again
    passes, told = [*passes, both(pairs)], judge.told()
    longer = both([(f"{one}\n{_GIVEN['padding']}", one) for one, _ in pairs])
    found = agreement(np.stack(passes), judge.config.compares)
    found["longer"] = agreement(np.stack([longer] * 2))["first"]
    for name, (centre, low, high, _) in found.items():
        meaning = _GIVEN["figures"][name].replace("{better}", better)
        yield f"{100 * centre:6.1f} % {f'({100 * low:.1f} to {100 * high:.1f})':16} {meaning}", False
    (calls, _), (bad, answers) = told["judge/calls"], told["judge/unreadable"]
    price = f"; {2000 * told['judge/price'][0] / calls:.4g} for 1,000 pairs" if judge.config.prices else ""
    yield f"{100 * bad / answers:6.1f} % {'':16} of {calls:.0f} answers are no verdict{price}", False
    if found["separation"].low <= 0:
        yield f"{judge.at} is refused: {_GIVEN['refused']}", True
