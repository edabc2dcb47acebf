"""The embedded task `tldr_mini`: generated posts like those of TL;DR, with flawed references.

A post states one fact for each of several slots (who did what to which thing, when, where, why, ...). Between
the facts are filler sentences and distractors. A distractor mentions a wrong value of a slot. A good summary
states the relevant facts and the fact in the title; all other facts are clutter. The subreddit decides which
half of the facts is relevant. Two examples of good summaries:

    Someone just sold my guitar last monday. Maybe I should sue them.               (r/legaladvice)
    My sister took my stuff because of their wedding. I feel furious.               (r/offmychest)

In the post, the same word precedes a fact as in the summary ("last monday"), so a model with two layers
learns within minutes to copy facts. A different word precedes a distractor ("until friday").

The references imitate people. They state relevant facts more often than other facts, with different habits in
each subreddit. Most facts are stated vaguely ("recently"). Some references copy a filler sentence, or state
the value of a distractor instead of the fact. Greedy decoding after SFT is therefore vague as well, and RLHF
must learn which slots to state in which subreddit. The gold score (`tldr_mini_judge`) reads the facts from
the post and compares the summary with these facts.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from rlhf.config.schema import data_file
from rlhf.config.tasks import Difficulty, TLDRMiniConfig
from rlhf.tasks.source import EmbeddedSource


@dataclass(frozen=True, slots=True)
class _Slot:
    """A kind of fact, with templates of texts in which `_` stands for the value of the fact."""

    name: str
    values: tuple[str, ...]
    facts: tuple[str, ...]  # sentences of a post that state the fact
    distractors: tuple[str, ...]  # sentences that mention a wrong value
    title: str  # title of a post that states the fact
    phrase: str  # how a summary states the fact
    vague: str  # how a summary mentions the fact without its value


def _slot(name: str, values: str, facts: list[str], distractors: list[str], **texts: str) -> _Slot:
    return _Slot(name, tuple(values.split()), tuple(facts), tuple(distractors), **texts)


_TEXTS = data_file("rlhf.tasks", "tldr_mini.yaml")
SLOTS = tuple(_slot(name, **texts) for name, texts in _TEXTS["slots"].items())
BY_NAME = {slot.name: slot for slot in SLOTS}
_SLOT_OF = {value: slot for slot in SLOTS for value in slot.values}
BACKBONE = ("who", "deed", "thing")  # slots in every summary, at least vaguely: "Someone took my stuff."
FILLER = tuple(_TEXTS["filler"])
# Slots by relevance in a subreddit, most relevant first; half of a post's slots are relevant.
_FOCUS = {subreddit: tuple(names.split()) for subreddit, names in _TEXTS["focus"].items()}
_RELEVANT_ODDS = -0.6  # log-odds that a reference states a relevant fact exactly
_IRRELEVANT_ODDS = -1.8  # log-odds that a reference states any other fact exactly
_HABIT_ODDS = 0.5  # largest change of these two log-odds by the habit of a subreddit
_VAGUE_SHARE = 0.9  # share of facts not stated exactly that are stated vaguely; the rest is skipped
_FILLER_SHARE = 0.2  # share of references with a filler sentence
_WRONG_SHARE = 0.03  # share of exactly stated facts that have a wrong value


def _relevant_slots(subreddit: str, names: list[str]) -> list[str]:
    """Return the relevant half of the slots `names` in a subreddit, most relevant first."""
    return [name for name in _FOCUS.get(subreddit, names) if name in names][: len(names) // 2]


@cache
def _habits(subreddit: str, slots: tuple[str, ...]) -> dict[str, float]:
    """Return the habit of a subreddit: slot -> change of the log-odds that a reference states the fact.

    The changes are evenly spaced from -HABIT_ODDS to HABIT_ODDS, in a random order that only the subreddit
    and the slots determine.
    """
    order = list(slots)
    random.Random(f"habits/{subreddit}").shuffle(order)
    return {name: _HABIT_ODDS * (2 * rank / (len(order) - 1) - 1) for rank, name in enumerate(order)}


@dataclass(frozen=True, slots=True)
class _Level:
    """The settings of a difficulty."""

    subreddits: int  # number of subreddits, the first of FOCUS
    slots: list[str]  # slots of a post
    values: int  # number of values of each slot
    distractors: int  # distractors in a post
    filler: int  # filler sentences in a post


LEVELS = {Difficulty(name): _Level(**level) for name, level in _TEXTS["levels"].items()}


@dataclass(frozen=True, slots=True)
class _Post:
    """The content of a post."""

    subreddit: str
    title: str  # slot whose fact is the title
    facts: dict[str, str]  # slot -> value, in the order of SLOTS
    distractors: dict[str, str]  # slot -> wrong value
    sentences: tuple[str, ...]

    @property
    def query(self) -> str:
        """Return the prompt, in the format of TL;DR."""
        title = fill(BY_NAME[self.title].title, self.facts[self.title])
        return f"SUBREDDIT: {self.subreddit}\n\nTITLE: {title}\n\nPOST: {' '.join(self.sentences)}\n\nTL;DR:"


def fill(template: str, value: str) -> str:
    """Return `template` with `_` replaced by `value`."""
    return template.replace("_", value)


_TITLED = {fill(slot.title, value): slot.name for slot in SLOTS for value in slot.values}  # title -> slot


def make_post(rng: random.Random, level: _Level) -> _Post:
    """Return a random post of the difficulty `level`."""
    facts = {name: rng.choice(BY_NAME[name].values[: level.values]) for name in level.slots}
    distractors = {
        name: rng.choice([value for value in BY_NAME[name].values[: level.values] if value != facts[name]])
        for name in rng.sample(level.slots, level.distractors)
    }
    sentences = [fill(rng.choice(BY_NAME[name].facts), value) for name, value in facts.items()]
    rng.shuffle(sentences)
    others = [fill(rng.choice(BY_NAME[name].distractors), value) for name, value in distractors.items()]
    for sentence in others + rng.sample(FILLER, level.filler):
        sentences.insert(rng.randint(0, len(sentences)), sentence)
    return _Post(
        subreddit=rng.choice(list(_FOCUS)[: level.subreddits]),
        title=rng.choice(level.slots),
        facts=facts,
        distractors=distractors,
        sentences=tuple(sentences),
    )


def make_reference(rng: random.Random, post: _Post) -> str:
    """Return a random reference: a flawed summary of the post."""
    usual = _habits(post.subreddit, tuple(post.facts))
    relevant = _relevant_slots(post.subreddit, list(post.facts))
    words: dict[str, str] = {}
    for name, value in post.facts.items():
        slot = BY_NAME[name]
        odds = usual[name] + (_RELEVANT_ODDS if name in relevant else _IRRELEVANT_ODDS)
        exact = 1 / (1 + math.exp(-odds))
        draw = rng.random()
        if draw < exact:
            wrong = rng.random() < _WRONG_SHARE
            said = post.distractors.get(name, rng.choice(slot.values)) if wrong else value
            words[name] = fill(slot.phrase, said)
        elif draw < exact + _VAGUE_SHARE * (1 - exact) or name in BACKBONE:
            words[name] = slot.vague
    sentences = list(write(words))
    if rng.random() < _FILLER_SHARE:
        filler = [sentence for sentence in post.sentences if sentence in FILLER]
        sentences.insert(rng.randint(0, 1), rng.choice(filler))
    return " " + " ".join(sentences)


def write(words: dict[str, str]) -> Iterator[str]:
    """Yield the sentences of a summary from its phrases (slot -> phrase)."""
    main = [words[name] for name in words if name not in ("feeling", "age", "ask")]
    if main:
        yield " ".join(main) + "."
    for name in ("feeling", "age"):
        if name in words:
            yield words[name] + "."
    if "ask" in words:
        yield words["ask"]


_HEADINGS = ("SUBREDDIT:", "TITLE:", "POST:", "TL;DR:")
_TOKEN_PATTERN = rf"{'|'.join(_HEADINGS)}|\n+| ?[A-Za-z0-9/']+|[^\sA-Za-z0-9]"


def _tokens() -> tuple[str, ...]:
    """Return every token of the generated texts except special tokens. Words begin with a space."""
    texts = [*FILLER, *_FOCUS, "What now?"]
    for slot in SLOTS:
        texts += [*slot.values, slot.title, slot.phrase, slot.vague, *slot.facts, *slot.distractors]
    found = {each for text in texts for each in re.findall(_TOKEN_PATTERN, f" {text}") if each.strip(" _")}
    return (*_HEADINGS, "\n\n", *sorted(found))


class TLDRMiniSource(EmbeddedSource):
    """A source of posts and references, generated from `task.data_seed`, and of pairs from a folder."""

    config: TLDRMiniConfig
    pattern = _TOKEN_PATTERN
    words = _tokens()

    def generate(self, split: str, size: int) -> dict[str, list[str]]:
        """Return `size` posts with flawed references; a larger `size` only appends examples."""
        rng = random.Random(f"tldr_mini/{self.config.data_seed}/{split}")  # noqa: S311
        rows: dict[str, list[str]] = {"query": [], "reference_response": []}
        for _ in range(size):
            post = make_post(rng, LEVELS[self.config.difficulty])
            rows["query"].append(post.query)
            rows["reference_response"].append(make_reference(rng, post))
        return rows


# The gold score of `task=tldr_mini`: a program that compares a summary with the facts of its post.


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
def _fact_pattern(slot: _Slot) -> re.Pattern[str]:
    values = f"({'|'.join(slot.values)})"
    return re.compile("|".join(re.escape(fact).replace("_", values) for fact in slot.facts))


def read_facts(query: str) -> dict[str, str]:
    """Return the facts that the post in a prompt states: slot -> value."""
    post = " ".join(query.partition("POST:")[2].split())
    found = {slot.name: _fact_pattern(slot).search(post) for slot in SLOTS}
    return {name: next(filter(None, match.groups())) for name, match in found.items() if match}


def fact_weights(query: str, names: list[str]) -> dict[str, float]:
    """Return the points of each fact of a post: slot -> points. The points add up to POINTS.

    The subreddit decides which half of the facts is relevant; the fact in the title is always relevant. Other
    facts have 0 points.

    Args:
        query: the prompt with subreddit, title and post.
        names: slots of the facts that the post states.
    """
    subreddit = query.partition("SUBREDDIT:")[2].split("\n")[0].strip()
    relevant = _relevant_slots(subreddit, names)
    titled = title_slot(query)
    if titled in names and titled not in relevant:
        relevant.append(titled)
    raw = {name: 1.5 - rank / len(relevant) for rank, name in enumerate(relevant)}
    return {name: POINTS * raw.get(name, 0.0) / sum(raw.values()) for name in names}


def title_slot(query: str) -> str | None:
    """Return the slot whose fact is the title of the post in a prompt, or None."""
    return _TITLED.get(query.partition("TITLE:")[2].split("\n")[0].strip())


def _value_credit(slot: _Slot, stated: str, fact: str) -> float:
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
        slot = _SLOT_OF.get(word)
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
