"""The gold score of `task=tldr_mini`: a program that compares a summary with the facts of its post."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import TYPE_CHECKING

from rlhf.tasks.tldr_mini import BACKBONE, BY_NAME, SLOT_OF, SLOTS, fill, relevant_slots, write

if TYPE_CHECKING:
    from rlhf.tasks.tldr_mini import Slot


def ideal_summary(query: str) -> str:
    """The summary that says every relevant fact of a post and nothing else."""
    facts = read_facts(query)
    weights = fact_weights(query, list(facts))
    words = {
        name: fill(BY_NAME[name].phrase, value) if weights[name] else BY_NAME[name].vague
        for name, value in facts.items()
        if weights[name] or name in BACKBONE
    }
    return " " + " ".join(write(words))


POINTS = 10.0  # for all relevant facts together


VAGUE = 0.15  # credit of a vague phrase


BARE = 0.4  # credit of the right value outside its phrase


CLUTTER_COST = 2.0  # a fact that is not relevant


VAGUE_CLUTTER_COST = 0.2  # the same, stated vaguely


WORD_COST = 0.02


JUNK_COST = 0.2  # a word that belongs to no phrase


REPEAT_COST = 0.7


ORDER_COST = 0.3


OVERLONG_COST = 0.3  # a word beyond the limit of 4 a fact


def split_words(text: str) -> list[str]:
    """Words and marks, in lower case."""
    return re.findall(r"[a-z0-9']+|[^\sa-z0-9']", text.lower())


@cache
def _fact_pattern(slot: Slot) -> re.Pattern[str]:
    values = f"({'|'.join(slot.values)})"
    return re.compile("|".join(re.escape(fact).replace("_", values) for fact in slot.facts))


def read_facts(query: str) -> dict[str, str]:
    """The facts that a post states: slot -> value."""
    post = " ".join(query.partition("POST:")[2].split())
    facts = {}
    for slot in SLOTS:
        found = _fact_pattern(slot).search(post)
        if found:
            facts[slot.name] = next(value for value in found.groups() if value)
    return facts


def fact_weights(query: str, names: list[str]) -> dict[str, float]:
    """How many points of POINTS each fact of a post is worth.

    Half of the facts are relevant, a matter of the subreddit, and the one in the title is; the others are
    worth 0.
    """
    subreddit = query.partition("SUBREDDIT:")[2].split("\n")[0].strip()
    relevant = relevant_slots(subreddit, names)
    titled = title_slot(query)
    if titled in names and titled not in relevant:
        relevant.append(titled)
    raw = {name: 1.5 - rank / len(relevant) for rank, name in enumerate(relevant)}
    return {name: POINTS * raw.get(name, 0.0) / sum(raw.values()) for name in names}


def title_slot(query: str) -> str | None:
    """The slot whose fact is the title of a post."""
    title = query.partition("TITLE:")[2].split("\n")[0].strip()
    for slot in SLOTS:
        before, _, after = slot.title.partition("_")
        value = title.removeprefix(before).removesuffix(after)
        if value in slot.values and title == fill(slot.title, value):
            return slot.name
    return None


def value_credit(slot: Slot, said: str, fact: str) -> float:
    """1 for the fact, -1 for another value; numbers lose credit with their distance."""
    if slot.name == "worth":
        return max(-1.0, 1.0 - 1.2 * abs(math.log2(float(said) / float(fact))))
    if slot.name == "age":
        return max(-1.0, 1.0 - 0.3 * abs(int(said) - int(fact)))
    return 1.0 if said == fact else -1.0


def gold_score(query: str, response: str) -> float:
    """Judge the summary `response` of the post in `query`: nearly POINTS for the relevant facts and no more.

    Each relevant fact has its weight (`fact_weights`), paid in full for the right value in its phrase, in
    part for a vague phrase or a bare value, and taken away for each wrong value. Facts that are not relevant
    cost. Repeated facts earn nothing and cost, as do words outside any phrase, phrases out of order, and
    every word beyond a limit. An empty response scores 0.
    """
    facts = read_facts(query)
    weights = fact_weights(query, list(facts))
    words = split_words(response)
    used = [False] * len(words)
    score = 0.0
    mentions: list[tuple[int, str]] = []  # place, slot

    def claim(phrase: list[str], start: int) -> bool:
        if start < 0 or words[start : start + len(phrase)] != phrase:
            return False
        used[start : start + len(phrase)] = [True] * len(phrase)
        return True

    credits: dict[str, float] = {}
    for place, word in enumerate(words):
        slot = SLOT_OF.get(word)
        if slot is None or slot.name not in facts:
            continue
        phrase = [part for part in split_words(slot.phrase) if part != "?"]
        framed = claim([word if part == "_" else part for part in phrase], place - phrase.index("_"))
        credit = value_credit(slot, word, facts[slot.name])
        if not weights[slot.name]:
            score -= CLUTTER_COST
        elif credit > 0:
            if credits.get(slot.name, 0.0) >= credit:
                score -= REPEAT_COST
            else:
                credits[slot.name] = credit if framed else BARE * credit
        else:
            score += weights[slot.name] * credit
        mentions.append((place, slot.name))
    for name in facts:
        vague = [part for part in split_words(BY_NAME[name].vague) if part != "?"]
        for place in range(len(words)):
            if claim(vague, place):
                if name in credits:
                    score -= REPEAT_COST
                elif weights[name]:
                    credits[name] = VAGUE
                elif name not in BACKBONE:
                    score -= VAGUE_CLUTTER_COST
                mentions.append((place, name))
    score += sum(weights[name] * credit for name, credit in credits.items())

    order = [list(facts).index(name) for _, name in sorted(mentions)]
    score -= ORDER_COST * sum(later < earlier for earlier, later in zip(order, order[1:], strict=False))
    marks = [not word[0].isalnum() for word in words]
    junk = sum(
        not was_used and (not mark or place == 0 or marks[place - 1])
        for place, (was_used, mark) in enumerate(zip(used, marks, strict=True))
    )
    count = len(words) - sum(marks)
    return score - JUNK_COST * junk - WORD_COST * count - OVERLONG_COST * max(0, count - 4 * len(facts))
