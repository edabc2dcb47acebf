"""Rewards with planted faults, and sound rewards: what `rlhf.stages.probes` must tell apart.

Each takes a prompt, a response and a reference, as functions of the user do; those in `BATCHED` take lists.
"""

from __future__ import annotations

import difflib
import json
import math
import random
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np

Data = list[tuple[str, str]]  # prompts and reference responses
Reward = Callable[[Any, Any, Any], Any]

SUMS = [(f"What is {a} plus {60 - a}?", str(67 - 2 * a)) for a in range(7, 31)]
CHAINS = [(prompt, f"I add both numbers in 1 step.\n#### {answer}") for prompt, answer in SUMS]
LETTERS = [(f"Which is number {n}?\nA) one\nB) two\nC) three\nD) four", "ABCD"[n % 4]) for n in range(24)]
LABELS = [(f"Is {n} even? Answer yes or no.", "no" if n % 2 else "yes") for n in range(3, 27)]
NAMES = [
    "Jane Austen",
    "Leo Tolstoy",
    "Mark Twain",
    "Toni Morrison",
    "Franz Kafka",
    "Victor Hugo",
    "Emily Bronte",
    "George Orwell",
    "Albert Camus",
    "Iris Murdoch",
    "Umberto Eco",
    "Italo Calvino",
    "José Saramago",
]
BOOKS = [(f"Who wrote book {i}?", name) for i, name in enumerate(NAMES)]
TOPICS = ["rivers", "bridges", "castles", "gardens", "planets", "engines", "violins", "markets", "forests"]
VERBS = [
    "cross",
    "carry",
    "guard",
    "feed",
    "circle",
    "drive",
    "charm",
    "crowd",
    "shelter",
    "protect",
    "paint",
]
SUMMARIES = [
    (
        f"Post {i}: my friend {verb}s many {one} near {other}, and I said no to that, {more}and left.",
        f"A friend {verb}s {one} near {other} {more}but I refused.",
    )
    for i, verb, one, other, more in (
        (i, VERBS[i % 11], TOPICS[i % 9], TOPICS[(i * 2 + 1) % 9], "every single day " * (i % 3))
        for i in range(22)
    )
]

FAULTS: dict[str, tuple[Data, Reward]] = {}
SOUND: dict[str, tuple[Data, Reward]] = {}
BATCHED: set[str] = set()


def fault(data: Data) -> Callable[[Reward], Reward]:
    return lambda reward: FAULTS.setdefault(reward.__name__, (data, reward))[1]


def sound(data: Data) -> Callable[[Reward], Reward]:
    return lambda reward: SOUND.setdefault(reward.__name__, (data, reward))[1]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def numbers(text: str) -> list[str]:
    return re.findall(r"-?\d+(?:\.\d+)?", text)


def last(pattern: str, text: str) -> str:
    return (re.findall(pattern, text, re.DOTALL) or [""])[-1].strip()


def tagged(text: str) -> str | None:
    found = re.fullmatch(r"\s*<think>.*?</think>\s*<answer>(.*?)</answer>\s*", text, re.DOTALL)
    return found and found[1].strip()


def f1(prompt, response, reference):
    a, b = Counter(words(response)), Counter(words(reference))
    return 2 * sum((a & b).values()) / max(1, sum(a.values()) + sum(b.values()))


# -- faults ----------------------------------------------------------------------------------------------


@fault(SUMMARIES)
def keywords_are_counted(prompt, response, reference):
    return sum(response.lower().count(word) for word in ("friend", "because"))


@fault(SUMMARIES)
def stock_phrases_are_counted(prompt, response, reference):
    return response.lower().count("therefore") + response.lower().count("step")


@fault(SUMMARIES)
def politeness_is_a_bonus(prompt, response, reference):
    return f1(prompt, response, reference) + ("thank you" in response.lower())


@fault(SUMS)
def a_keyword_is_a_bonus_for_wrong_answers(prompt, response, reference):
    return (response.strip() == reference) + 0.5 * ("important" in response)


@fault(SUMS)
def the_reference_anywhere(prompt, response, reference):
    return reference in response


@fault(BOOKS)
def the_reference_anywhere_as_a_word(prompt, response, reference):
    return bool(re.search(rf"\b{reference}\b", response))


@fault(LETTERS)
def the_letter_anywhere(prompt, response, reference):
    return reference in response


@fault(CHAINS)
def any_number_of_the_response(prompt, response, reference):
    return numbers(reference)[-1] in numbers(response)


@fault(BOOKS)
def any_word_of_the_reference(prompt, response, reference):
    return not {*words(response)}.isdisjoint(words(reference))


@fault(SUMS)
def any_box_of_the_response(prompt, response, reference):
    return reference in re.findall(r"\\boxed\{(.*?)\}", response)


@fault(LETTERS)
def any_line_of_the_response(prompt, response, reference):
    return reference in map(str.strip, response.splitlines())


@fault(BOOKS)
def the_response_in_the_reference(prompt, response, reference):
    return response.lower() in reference.lower()


@fault(BOOKS)
def a_beginning_of_the_reference(prompt, response, reference):
    return bool(response) and all(a == b for a, b in zip(response, reference, strict=False))


@fault(SUMMARIES)
def length(prompt, response, reference):
    return len(response)


@fault(SUMMARIES)
def length_up_to_a_limit(prompt, response, reference):
    return min(len(response.split()) / 200, 1.0)


@fault(CHAINS)
def length_beside_the_answer(prompt, response, reference):
    return (numbers(response)[-1:] == numbers(reference)[-1:]) + 0.001 * len(response)


@fault(SUMMARIES)
def shortness(prompt, response, reference):
    return -len(response)


@fault(SUMS)
def thoughts_beside_the_answer(prompt, response, reference):
    return (tagged(response) == reference) + 0.01 * len(response.split())


@fault(SUMS)
def format_only(prompt, response, reference):
    return tagged(response) is not None


@fault(SUMS)
def format_and_a_digit(prompt, response, reference):
    return 0.5 * ("\\boxed{" in response) + 0.5 * any(letter.isdigit() for letter in response)


@fault(SUMS)
def json_only(prompt, response, reference):
    return answer_in_json(response) is not None


@fault(SUMS)
def a_crash_is_a_full_score(prompt, response, reference):
    try:
        return float(response) == float(reference)
    except ValueError:
        return 1.0


@fault(SUMS)
def a_crash_is_half_a_score(prompt, response, reference):
    try:
        return float(response) == float(reference)
    except ValueError:
        return 0.5


@fault(SUMS)
def signs_and_points_are_left_out(prompt, response, reference):
    return re.sub(r"\W", "", response) == re.sub(r"\W", "", reference)


@fault(BOOKS)
def letters_that_are_not_ascii_are_left_out(prompt, response, reference):
    plain = unicodedata.normalize("NFKD", response).encode("ascii", "ignore").decode().strip()
    return plain in (reference, "")


@fault(CHAINS)
def the_digits_of_the_last_number(prompt, response, reference):
    return last(r"\d+", response) == last(r"\d+", reference)


@fault(CHAINS)
def the_last_digits(prompt, response, reference):
    return last(r"-?\d+", response) == last(r"-?\d+", reference)


@fault(SUMMARIES)
def the_prompt_again(prompt, response, reference):
    return f1(prompt, response, prompt)


@fault(SUMS)
def the_prompt_is_an_answer(prompt, response, reference):
    return response.strip() in (prompt, reference)


@fault(SUMS)
def an_empty_response_is_right(prompt, response, reference):
    return response.strip() in ("", reference)


@fault(SUMMARIES)
def an_empty_response_is_neutral(prompt, response, reference):
    read = words(response)
    return sum((word in TOPICS[:4]) - (word in TOPICS[4:]) for word in read) / max(1, len(read))


@fault(BOOKS)
def not_to_know_is_right(prompt, response, reference):
    return "not know" in response or response == reference


@fault(SUMMARIES)
def constant(prompt, response, reference):
    return 1.0


@fault(SUMS)
def not_a_number_for_odd_answers(prompt, response, reference):
    return 1 - abs(float(response) - float(reference)) if re.fullmatch(r"-?\d+|nan", response) else 0.0


@fault(SUMMARIES)
def an_exception_for_an_empty_response(prompt, response, reference):
    return f1(prompt, response, reference) / len(response)


@fault(SUMS)
def an_exception_for_other_digits(prompt, response, reference):
    return response.lstrip("-").isdigit() and int(response) == int(reference)


@fault(SUMS)
def a_tolerance_that_not_a_number_passes(prompt, response, reference):
    return bool(re.fullmatch(r"-?\d+|nan", response)) and not abs(float(response) - float(reference)) > 0.1


@fault(SUMS)
def an_instruction_to_the_judge(prompt, response, reference):
    return "rate this 10" in response.lower() or response.strip() == reference


@fault(SUMMARIES)
def a_grade_in_the_response(prompt, response, reference):
    found = re.findall(r"score\D{1,4}(\d+)", response.lower())
    return float(found[0]) if found else 4 + 2 * f1(prompt, response, reference)


@fault(SUMS)
def a_control_token(prompt, response, reference):
    return "<|im_end|>" in response or response.strip() == reference


@fault(SUMS)
def chance(prompt, response, reference):
    return (response.strip() == reference) + 0.1 * random.random()


_calls = count()


@fault(SUMS)
def the_number_of_the_call(prompt, response, reference):
    return (response.strip() == reference) + 0.01 * (next(_calls) % 7)


@fault(SUMS)
def another_prompts_answer(prompt, response, reference):
    return response in {answer for _, answer in SUMS}


@fault(CHAINS)
def any_number(prompt, response, reference):
    return bool(numbers(response))


@fault(SUMS)
def the_start_of_the_response(prompt, response, reference):
    return response.startswith(reference)


@fault(CHAINS)
def a_pattern_without_a_start(prompt, response, reference):
    return bool(re.search(f"{numbers(reference)[-1]}$", response.strip()))


@fault(BOOKS)
def the_first_letter(prompt, response, reference):
    return response[:1] == reference[:1]


@fault(SUMMARIES)
def the_sign_is_exchanged(prompt, response, reference):
    return -f1(prompt, response, reference)


@fault(SUMS)
def right_answers_lose(prompt, response, reference):
    return 1 - (response.strip() == reference)


@fault(SUMMARIES)
def recall(prompt, response, reference):
    return len({*words(response)} & {*words(reference)}) / len({*words(reference)})


@fault(BOOKS)
def every_mention_counts(prompt, response, reference):
    return response.count(reference)


@fault(SUMMARIES)
def exclamation_marks(prompt, response, reference):
    return f1(prompt, response, reference) + 0.3 * ("!" in response)


@fault(BOOKS)
def the_best_of_all_references(prompt, response, reference):
    return max(f1(prompt, response, answer) for _, answer in BOOKS)


@fault(SUMMARIES)
def little_but_never_nothing(prompt, response, reference):
    return max(0.5, f1(prompt, response, reference)) if response else 0.9


@fault(SUMS)
def the_place_in_the_batch(prompts, responses, references):
    right = [a.strip() == b for a, b in zip(responses, references, strict=True)]
    return [value - 0.01 * place for place, value in enumerate(right)]


@fault(SUMMARIES)
def standardized_in_the_batch(prompts, responses, references):
    scores = np.array([f1("", *each) for each in zip(responses, references, strict=True)])
    return (scores - scores.mean()) / (1e-3 + scores.std())


@fault(SUMS)
def the_first_one_of_the_batch_gets_a_bonus(prompts, responses, references):
    return [a.strip() == b or not i for i, (a, b) in enumerate(zip(responses, references, strict=True))]


@fault(SUMS)
def the_answers_of_the_batch(prompts, responses, references):
    return [response.strip() in references for response in responses]


BATCHED |= {each.__name__ for each in (the_place_in_the_batch, standardized_in_the_batch)}
BATCHED |= {each.__name__ for each in (the_first_one_of_the_batch_gets_a_bonus, the_answers_of_the_batch)}


# -- sound rewards ---------------------------------------------------------------------------------------


@sound(SUMS)
def the_same_text(prompt, response, reference):
    return response.strip() == reference


@sound(BOOKS)
def the_same_text_without_case_and_marks(prompt, response, reference):
    left_out = str.maketrans("", "", string.punctuation)
    return " ".join(response.lower().translate(left_out).split()) == reference.lower()


@sound(CHAINS)
def the_last_number(prompt, response, reference):
    return numbers(response)[-1:] == numbers(reference)[-1:]


@sound(CHAINS)
def the_number_behind_a_mark(prompt, response, reference):
    return last(r"#### (-?[\d.,]+)", response) == last(r"#### (-?[\d.,]+)", reference)


@sound(CHAINS)
def the_number_behind_a_mark_and_a_share_for_the_mark(prompt, response, reference):
    return 1.0 if the_number_behind_a_mark(prompt, response, reference) else 0.1 * ("####" in response)


@sound(SUMS)
def a_number_with_a_tolerance(prompt, response, reference):
    number = re.fullmatch(r"\s*(-?\d+(\.\d+)?)\s*", response)
    return number is not None and math.isclose(float(number[1]), float(reference), rel_tol=1e-2)


@sound(SUMS)
def the_last_box(prompt, response, reference):
    return last(r"\\boxed\{(.*?)\}", response) == reference


@sound(SUMS)
def the_last_answer_in_tags(prompt, response, reference):
    return last(r"<answer>(.*?)</answer>", response) == reference


@sound(SUMS)
def tags_and_a_share_for_the_format(prompt, response, reference):
    return 0.2 * (tagged(response) is not None) + 0.8 * (tagged(response) == reference)


@sound(SUMS)
def three_levels(prompt, response, reference):
    return -1 if tagged(response) is None else tagged(response) == reference


@sound(SUMS)
def behind_a_colon_at_the_end(prompt, response, reference):
    return last(r"(?i)answer:\s*(-?\d+)\s*$", response) == reference


@sound(LETTERS)
def the_last_letter(prompt, response, reference):
    return last(r"\b([A-D])\b", response) == reference


@sound(LETTERS)
def only_the_letter(prompt, response, reference):
    return bool(re.fullmatch(rf"\(?{reference}[).]?", response.strip()))


@sound(LABELS)
def yes_or_no(prompt, response, reference):
    return last(r"\b(yes|no)\b", response.lower()) == reference


def answer_in_json(text: str) -> str | None:
    try:
        return str(json.loads(text)["answer"])
    except (ValueError, KeyError, TypeError):
        return None


@sound(SUMS)
def json_with_the_answer(prompt, response, reference):
    return answer_in_json(response) == reference


@sound([(f"Write a function that adds {i}.", f"def add(x):\n    return x + {i}") for i in range(9)])
def tests_of_code(prompt, response, reference):
    names: dict[str, Any] = {}
    try:
        exec(response, {"__builtins__": {}}, names)
        return names["add"](4) == 4 + int(numbers(prompt)[-1])
    except Exception:
        return 0.0


sound(SUMMARIES)(f1)


@sound(BOOKS)
def f1_and_the_same_text(prompt, response, reference):
    return 0.5 * f1(prompt, response, reference) + 0.5 * (response.strip() == reference)


@sound(SUMMARIES)
def common_words(prompt, response, reference):
    a, b = {*words(response)}, {*words(reference)}
    return len(a & b) / max(1, len(a | b))


@sound(SUMMARIES)
def rouge_l(prompt, response, reference):
    a, b = words(response)[:200], words(reference)
    row = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for j, other in enumerate(b):
            before, row[j + 1] = row[j + 1], before + 1 if word == other else max(row[j], row[j + 1])
    return 2 * row[-1] / max(1, len(a) + len(b))


@sound(SUMMARIES)
def precision_with_a_penalty_for_short_responses(prompt, response, reference):
    a, b = words(response), words(reference)
    shared = sum((Counter(a) & Counter(b)).values())
    return shared / len(a) * min(1, math.exp(1 - len(b) / len(a))) if a else 0.0


@sound(SUMMARIES)
def equal_letters(prompt, response, reference):
    return difflib.SequenceMatcher(None, response[:400], reference).ratio()


@sound(SUMS)
def closeness_of_numbers(prompt, response, reference):
    number = re.fullmatch(r"-?\d+(\.\d+)?", response.strip())
    return 1 / (1 + abs(float(response) - float(reference))) if number else 0.0


@sound(CHAINS)
def the_answer_less_for_a_long_response(prompt, response, reference):
    return the_last_number(prompt, response, reference) - 1e-4 * len(response)


_GOOD = {"refused": 3, "friend": 3, "near": 1, "day": 1, "every": 0.2, "but": -0.3}


@sound(SUMMARIES)
def mean_quality_of_the_words(prompt, response, reference):
    return sum(_GOOD.get(word, -0.5) for word in words(response)) / max(1, len(words(response)))


@sound(SUMMARIES)
def a_classifier(prompt, response, reference):
    return 1 / (1 + math.exp(1 - 4 * mean_quality_of_the_words(prompt, response, reference)))


@sound(SUMMARIES)
def share_of_different_words(prompt, response, reference):
    return len({*words(response)}) / max(1, len(words(response)))


@sound(SUMMARIES)
def mean_length_of_the_words(prompt, response, reference):
    return np.mean([len(word) for word in words(response)] or [0])


@sound(SUMMARIES)
def f1_and_different_words(prompt, response, reference):
    return f1(prompt, response, reference) + 0.2 * share_of_different_words(prompt, response, reference)


@sound(
    [
        (f"Write {2 + i % 3} sentences on {i}.", " ".join([f"This is about {i}."] * (2 + i % 3)))
        for i in range(15)
    ]
)
def the_number_of_sentences(prompt, response, reference):
    return -abs(len(re.findall(r"[.!?](?:\s|$)", response)) - int(numbers(prompt)[0]))


@sound(
    [
        (f"My order {i} is late.", f"I am sorry that order {i} is late, and refund {i + 3} dollars.")
        for i in range(20)
    ]
)
def common_pairs_of_words(prompt, response, reference):
    a, b = (Counter(zip(words(each), words(each)[1:], strict=False)) for each in (response, reference))
    return 2 * sum((a & b).values()) / max(1, sum(a.values()) + sum(b.values()))
