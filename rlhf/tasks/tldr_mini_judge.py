"""The gold score of `task=tldr_mini`: a program that compares a summary with the facts of its post."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import TYPE_CHECKING

from rlhf.tasks.tldr_mini import BACKBONE, BY_NAME, SLOT_OF, SLOTS, fill, relevant_slots

if TYPE_CHECKING:
    from rlhf.tasks.tldr_mini import Slot

POINTS = 10.0  # points of all relevant facts together
_VAGUE = 0.15  # credit of a vague phrase, as a fraction of the points of its fact
_BARE = 0.4  # credit of the correct value outside its phrase, as a fraction of the points of its fact
_CLUTTER_COST = 2.0  # points lost per stated fact that is not relevant
_VAGUE_CLUTTER_COST = 0.2  # points lost per vague phrase of a fact that is not relevant
_WORD_COST = 0.02  # points lost per word
_JUNK_COST = 0.2  # points lost per word that belongs to no phrase
_REPEAT_COST = 0.7  # points lost per repeated fact
_ORDER_COST = 0.3  # points lost per two consecutive phrases in the wrong order
_OVERLONG_COST = 0.3  # points lost per word above the limit of 4 words per fact of the post


def split_words(text: str) -> list[str]:
    """Return the words and punctuation marks of a text in lower case."""
    return re.findall(r"[a-z0-9']+|[^\sa-z0-9']", text.lower())


@cache
def _fact_pattern(slot: Slot) -> re.Pattern[str]:
    values = f"({'|'.join(slot.values)})"
    return re.compile("|".join(re.escape(fact).replace("_", values) for fact in slot.facts))


def read_facts(query: str) -> dict[str, str]:
    """Return the facts that the post in a prompt states: slot -> value."""
    post = " ".join(query.partition("POST:")[2].split())
    facts = {}
    for slot in SLOTS:
        match = _fact_pattern(slot).search(post)
        if match:
            facts[slot.name] = next(value for value in match.groups() if value)
    return facts


def fact_weights(query: str, names: list[str]) -> dict[str, float]:
    """Return the points of each fact of a post: slot -> points. The points add up to POINTS.

    The subreddit decides which half of the facts is relevant; the fact in the title is always relevant. Other
    facts have 0 points.

    Args:
        query: the prompt with subreddit, title and post.
        names: slots of the facts that the post states.
    """
    subreddit = query.partition("SUBREDDIT:")[2].split("\n")[0].strip()
    relevant = relevant_slots(subreddit, names)
    titled = title_slot(query)
    if titled in names and titled not in relevant:
        relevant.append(titled)
    raw = {name: 1.5 - rank / len(relevant) for rank, name in enumerate(relevant)}
    return {name: POINTS * raw.get(name, 0.0) / sum(raw.values()) for name in names}


def title_slot(query: str) -> str | None:
    """Return the slot whose fact is the title of the post in a prompt, or None."""
    title = query.partition("TITLE:")[2].split("\n")[0].strip()
    for slot in SLOTS:
        before, _, after = slot.title.partition("_")
        value = title.removeprefix(before).removesuffix(after)
        if value in slot.values and title == fill(slot.title, value):
            return slot.name
    return None


def _value_credit(slot: Slot, stated: str, fact: str) -> float:
    """Return the credit of the value `stated` for a slot: 1 for the value `fact`, -1 for a wrong value.

    The credit of an amount or an age falls with its distance from the fact, down to -1.
    """
    if slot.name == "worth":
        return max(-1.0, 1.0 - 1.2 * abs(math.log2(float(stated) / float(fact))))
    if slot.name == "age":
        return max(-1.0, 1.0 - 0.3 * abs(int(stated) - int(fact)))
    return 1.0 if stated == fact else -1.0


def gold_score(query: str, response: str) -> float:
    """Return the gold score of the summary `response` of the post in `query`.

    A summary that states the relevant facts and nothing else scores nearly POINTS; an empty response scores
    0. `fact_weights` gives the points of each relevant fact. The correct value in its phrase earns all points
    of the fact. A vague phrase, or the correct value outside its phrase, earns a part of the points. A wrong
    value subtracts up to the points of the fact. Irrelevant facts, repeated facts, words outside any phrase,
    phrases out of order, and long summaries cost points.
    """
    facts = read_facts(query)
    weights = fact_weights(query, list(facts))
    words = split_words(response)
    used = [False] * len(words)
    score = 0.0
    mentions: list[tuple[int, str]] = []  # (index of the word, slot)

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
        credit = _value_credit(slot, word, facts[slot.name])
        if not weights[slot.name]:
            score -= _CLUTTER_COST
        elif credit > 0:
            if credits.get(slot.name, 0.0) >= credit:
                score -= _REPEAT_COST
            else:
                credits[slot.name] = credit if framed else _BARE * credit
        else:
            score += weights[slot.name] * credit
        mentions.append((place, slot.name))
    for name in facts:
        vague = [part for part in split_words(BY_NAME[name].vague) if part != "?"]
        for place in range(len(words)):
            if claim(vague, place):
                if name in credits:
                    score -= _REPEAT_COST
                elif weights[name]:
                    credits[name] = _VAGUE
                elif name not in BACKBONE:
                    score -= _VAGUE_CLUTTER_COST
                mentions.append((place, name))
    score += sum(weights[name] * credit for name, credit in credits.items())

    order = [list(facts).index(name) for _, name in sorted(mentions)]
    score -= _ORDER_COST * sum(later < earlier for earlier, later in zip(order, order[1:], strict=False))
    marks = [not word[0].isalnum() for word in words]
    junk = sum(  # a punctuation mark is junk only at the start or after another mark
        not was_used and (not mark or place == 0 or marks[place - 1])
        for place, (was_used, mark) in enumerate(zip(used, marks, strict=True))
    )
    count = len(words) - sum(marks)
    return score - _JUNK_COST * junk - _WORD_COST * count - _OVERLONG_COST * max(0, count - 4 * len(facts))
