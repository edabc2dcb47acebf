"""Probes of rewards: planted faults raise an alarm, sound rewards of all sorts do not."""

from __future__ import annotations

import difflib
import json
import math
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest

from rlhf.core.errors import RunError
from rlhf.stages.probes import probed

SUMS = [
    (f"What is {a} plus {b}?", str(a + b)) for a, b in zip(range(7, 55, 2), range(60, 12, -3), strict=False)
]
SUMS += [
    (f"What is {a} minus {a + b}?", str(-b)) for a, b in zip(range(3, 11), range(11, 43, 4), strict=True)
]
CHAINS = [(prompt, f"I add both numbers in 1 step.\n#### {answer}") for prompt, answer in SUMS]
LETTERS = [(f"Which one is number {n}?\nA) one\nB) two\nC) three\nD) four", "ABCD"[n % 4]) for n in range(24)]
TOPICS = "rivers bridges castles gardens planets engines violins markets forests harbours".split()
VERBS = "cross carry guard feed circle drive charm crowd shelter protect".split()
SUMMARIES = [
    (
        f"Post {i}: my friend {VERBS[i % 10]}s many {TOPICS[i % 10]} near {TOPICS[(i * 3 + 1) % 10]}, and I said no to that.",
        f"A friend {VERBS[i % 10]}s {TOPICS[i % 10]} near {TOPICS[(i * 3 + 1) % 10]} {'every day ' * (i % 3)}but I refused.",
    )
    for i in range(20)
]
CAPITALS = dict(
    France="Paris", Italy="Rome", Spain="Madrid", Norway="Oslo", Japan="Tokyo", Peru="Lima", Kenya="Nairobi",
    Cuba="Havana", Egypt="Cairo", Chad="N'Djamena", Togo="Lome", Mali="Bamako",
)  # fmt: skip
CITIES = [(f"What is the capital of {country}?", city) for country, city in CAPITALS.items()]
LABELS = [(f"Is {n} even? Answer yes or no.", "no" if n % 2 else "yes") for n in range(3, 27)]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def number(text: str) -> float:
    return float(re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)[-1].replace(",", ""))


def last_number(text: str) -> float | None:
    found = re.findall(r"-?\d+(?:\.\d+)?", text)
    return float(found[-1]) if found else None


def overlap(prompt, response, reference):
    a, b = Counter(words(response)), Counter(words(reference))
    common = sum((a & b).values())
    return 2 * common / max(1, sum(a.values()) + sum(b.values()))


def longest_common(a, b):
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0
        for j, y in enumerate(b):
            before, row[j + 1] = row[j + 1], before + 1 if x == y else max(row[j], row[j + 1])
    return row[-1]


def rouge_l(prompt, response, reference):
    a, b = words(response)[:200], words(reference)
    return 2 * longest_common(a, b) / max(1, len(a) + len(b))


def tagged(response):
    found = re.fullmatch(r"\s*<think>.*?</think>\s*<answer>(.*?)</answer>\s*", response, re.DOTALL)
    return found and found[1].strip()


def recovered(value: float) -> Callable[[str, str, str], float]:
    def reward(prompt, response, reference):
        try:
            return float(float(response) == float(reference))
        except ValueError:
            return value

    return reward


def plain(text: str) -> str:
    return re.sub("[^a-z0-9]", "", text.lower())


def distance(prompt, response, reference):
    try:
        return -abs(float(response) - float(reference))
    except ValueError:
        return -1.0


calls = count()

# Each fault: its data, and the reward of one response; or of lists, if it is in `BATCHED`.
FAULTS = {
    "keywords are counted": (SUMMARIES, lambda p, r, ref: sum(r.lower().count(w) for w in ("friend", "because"))),
    "stock phrases are counted": (SUMMARIES, lambda p, r, ref: r.lower().count("therefore") + r.lower().count("step")),
    "a keyword is a bonus": (SUMS, lambda p, r, ref: (r.strip() == ref) + 0.5 * ("important" in r)),
    "the reference anywhere": (SUMS, lambda p, r, ref: float(ref in r)),
    "the reference anywhere, as a word": (CITIES, lambda p, r, ref: float(bool(re.search(rf"\b{ref}\b", r)))),
    "a letter anywhere": (LETTERS, lambda p, r, ref: float(ref in r)),
    "any number of the response": (CHAINS, lambda p, r, ref: float(number(ref) in map(float, re.findall(r"-?\d+", r)))),
    "the response in the reference": (CITIES, lambda p, r, ref: float(r.lower() in ref.lower())),
    "length": (SUMMARIES, lambda p, r, ref: len(r)),
    "length up to a limit": (SUMMARIES, lambda p, r, ref: min(len(r.split()) / 200, 1.0)),
    "length beside the answer": (CHAINS, lambda p, r, ref: (last_number(r) == number(ref)) + 0.001 * len(r)),
    "shortness": (SUMMARIES, lambda p, r, ref: -len(r)),
    "format only": (SUMS, lambda p, r, ref: float(tagged(r) is not None)),
    "format, and a digit": (SUMS, lambda p, r, ref: 0.5 * ("\\boxed{" in r) + 0.5 * any(c.isdigit() for c in r)),
    "a crash is a full score": (SUMS, recovered(1.0)),
    "a crash is half a score": (SUMS, recovered(0.5)),

    "signs and points are left out": (SUMS, lambda p, r, ref: float(plain(r) == plain(ref))),
    "letters that are not ASCII are left out": (
        CITIES,
        lambda p, r, ref: float(
            unicodedata.normalize("NFKD", r).encode("ascii", "ignore").decode().strip() in (ref, "")
        ),
    ),
    "digits of the last number": (CHAINS, lambda p, r, ref: float(re.findall(r"\d+", r)[-1:] == re.findall(r"\d+", ref)[-1:])),
    "several answers": (SUMS, lambda p, r, ref: float(ref in r.split())),
    "any line of the response": (LETTERS, lambda p, r, ref: float(ref in [line.strip() for line in r.splitlines()])),
    "the prompt again": (SUMMARIES, lambda p, r, ref: len({*words(p)} & {*words(r)}) / len({*words(p)})),
    "the prompt is an answer": (SUMS, lambda p, r, ref: float(r.strip() in (p, ref))),
    "an empty response is right": (SUMS, lambda p, r, ref: float(not r.strip() or r.strip() == ref)),
    "constant": (SUMMARIES, lambda p, r, ref: 1.0),
    "not a number for odd answers": (SUMS, lambda p, r, ref: 1 - abs(float(r) - float(ref)) / 10 if re.fullmatch(r"-?\d+|nan", r) else 0.0),
    "an exception for an empty response": (SUMMARIES, lambda p, r, ref: overlap(p, r, ref) / len(r)),
    "an exception for digits that are none": (SUMS, lambda p, r, ref: float(r.lstrip("-").isdigit() and int(r) == int(ref))),
    "a tolerance that not-a-number passes": (SUMS, lambda p, r, ref: 0.0 if not re.fullmatch(r"-?\d+|nan", r) or abs(float(r) - float(ref)) > 0.1 else 1.0),
    "an instruction to the judge": (SUMS, lambda p, r, ref: 1.0 if "rate this 10" in r.lower() else float(r.strip() == ref)),
    "a grade in the response": (SUMMARIES, lambda p, r, ref: float((re.findall(r"score\D{1,4}(\d+)", r.lower()) or [4 + 2 * overlap(p, r, ref)])[0])),
    "chance": (SUMS, lambda p, r, ref: (r.strip() == ref) + 0.1 * random.random()),
    "number of the call": (SUMS, lambda p, r, ref: (r.strip() == ref) + 0.01 * (next(calls) % 7)),
    "another prompt's answer": (SUMS, lambda p, r, ref: float(r in {answer for _, answer in SUMS})),
    "any number": (CHAINS, lambda p, r, ref: float(last_number(r) is not None)),
    "the start of the response": (SUMS, lambda p, r, ref: float(r.startswith(ref))),
    "a pattern without an end": (SUMS, lambda p, r, ref: float(bool(re.match(re.escape(ref), r.strip())))),
    "a pattern without a start": (CHAINS, lambda p, r, ref: float(bool(re.search(f"{number(ref):.0f}$", r.strip())))),
    "the first letter": (CITIES, lambda p, r, ref: float(r[:1] == ref[:1])),
    "the sign is exchanged": (SUMMARIES, lambda p, r, ref: -overlap(p, r, ref)),
    "right answers lose": (SUMS, lambda p, r, ref: -float(r.strip() == ref)),
    "recall": (SUMMARIES, lambda p, r, ref: len({*words(r)} & {*words(ref)}) / len({*words(ref)})),
    "every mention counts": (CITIES, lambda p, r, ref: r.count(ref)),
    "repetition": (SUMMARIES, lambda p, r, ref: overlap(p, r, ref) + 0.1 * r.count("friend")),
}  # fmt: skip
BATCHED_FAULTS = {
    "the place in the batch": lambda ps, rs, refs: [(r.strip() == ref) - 0.01 * i for i, (r, ref) in enumerate(zip(rs, refs, strict=True))],
    "a rank in the batch": lambda ps, rs, refs: [(len(r) - np.mean([len(each) for each in rs])) / (1 + np.std([len(each) for each in rs])) for r in rs],
    "the first one gets a bonus": lambda ps, rs, refs: [float(r.strip() == ref or i == 0) for i, (r, ref) in enumerate(zip(rs, refs, strict=True))],
    "the answers of the batch": lambda ps, rs, refs: [float(r.strip() in refs) for r in rs],
}  # fmt: skip

GOOD = {"refused": 3, "friend": 3, "near": 1, "day": 1, "every": 0.2, "but": -0.3}
SOUND = {
    "the same text": (SUMS, lambda p, r, ref: float(r.strip() == ref)),
    "the same text without case and white space": (CITIES, lambda p, r, ref: float(" ".join(r.lower().split()) == ref.lower())),
    "the last number": (CHAINS, lambda p, r, ref: float(last_number(r) == number(ref))),
    "the number behind a mark": (CHAINS, lambda p, r, ref: float((re.findall(r"#### (-?[\d.,]+)", r) or [""])[-1] == ref.split()[-1])),
    "a number with a tolerance": (SUMS, lambda p, r, ref: float(bool(re.fullmatch(r"-?\d+(\.\d+)?", r.strip())) and abs(float(r) - float(ref)) <= 1e-2 * abs(float(ref)))),
    "the last box": (SUMS, lambda p, r, ref: float((re.findall(r"\\boxed\{([^{}]*)\}", r) or [""])[-1] == ref)),
    "the last answer in tags": (SUMS, lambda p, r, ref: float((re.findall(r"<answer>(.*?)</answer>", r) or [""])[-1].strip() == ref)),
    "tags, and a share for the format": (SUMS, lambda p, r, ref: 0.2 * (tagged(r) is not None) + 0.8 * (tagged(r) == ref)),
    "three levels": (SUMS, lambda p, r, ref: -1.0 if tagged(r) is None else float(tagged(r) == ref)),
    "the right letter": (LETTERS, lambda p, r, ref: float((re.findall(r"\b([A-D])\b", r) or [""])[-1] == ref)),
    "only the letter": (LETTERS, lambda p, r, ref: float(bool(re.fullmatch(rf"\(?{ref}[).]?", r.strip())))),
    "yes or no": (LABELS, lambda p, r, ref: float(r.strip().lower().rstrip(".") == ref)),
    "JSON with the answer": (SUMS, lambda p, r, ref: float(answer_in_json(r) == ref)),
    "F1 of words": (SUMMARIES, overlap),
    "F1 of the sets of words": (SUMMARIES, lambda p, r, ref: 2 * len({*words(r)} & {*words(ref)}) / max(1, len({*words(r)}) + len({*words(ref)}))),
    "ROUGE-L": (SUMMARIES, rouge_l),
    "ratio of equal letters": (SUMMARIES, lambda p, r, ref: difflib.SequenceMatcher(None, r[:400], ref).ratio()),
    "closeness of numbers": (SUMS, lambda p, r, ref: 1 / (1 + abs(float(r) - float(ref))) if re.fullmatch(r"-?\d+(\.\d+)?", r.strip()) else 0.0),
    "the answer, less for a long response": (CHAINS, lambda p, r, ref: (last_number(r) == number(ref)) - 1e-4 * len(r)),
    "mean quality of the words": (SUMMARIES, lambda p, r, ref: sum(GOOD.get(word, -0.5) for word in words(r)) / max(1, len(words(r)))),
    "share of different words": (SUMMARIES, lambda p, r, ref: len({*words(r)}) / max(1, len(words(r)))),
    "a classifier": (SUMMARIES, lambda p, r, ref: 1 / (1 + math.exp(1 - 4 * sum(GOOD.get(word, -0.2) for word in words(r)) / max(4, len(words(r)))))),
    "mean length of the words": (SUMMARIES, lambda p, r, ref: np.mean([len(word) for word in words(r)] or [0])),
    "F1 and the share of different words": (SUMMARIES, lambda p, r, ref: overlap(p, r, ref) + 0.2 * len({*words(r)}) / max(1, len(words(r)))),
}  # fmt: skip


def answer_in_json(text: str) -> str | None:
    try:
        return str(json.loads(text)["answer"])
    except (ValueError, KeyError, TypeError):
        return None


def alarms(data, reward, batched=False) -> list[str]:
    prompts, references = zip(*data, strict=True)

    def score(rows, texts):
        groups = [prompts[i] for i in rows], list(texts), [references[i] for i in rows]
        try:
            found = reward(*groups) if batched else [reward(*each) for each in zip(*groups, strict=True)]
        except Exception as error:
            raise RunError(repr(error)) from None
        if not np.isfinite(found).all():
            raise RunError("not finite")
        return np.array(found, float)

    return [line for line, alarm in probed(score, prompts, references, 0.0) if alarm]


@pytest.mark.parametrize("fault", [*FAULTS, *BATCHED_FAULTS])
def test_a_planted_fault_raises_an_alarm(fault):
    random.seed(0)
    if fault in FAULTS:
        assert alarms(*FAULTS[fault])
    else:
        assert alarms(SUMS, BATCHED_FAULTS[fault], batched=True)


@pytest.mark.parametrize("reward", SOUND)
def test_a_sound_reward_raises_no_alarm(reward):
    assert alarms(*SOUND[reward]) == []
