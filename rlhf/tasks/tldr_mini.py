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
from typing import TYPE_CHECKING

from rlhf.config.task import Difficulty
from rlhf.tasks.source import EmbeddedSource

if TYPE_CHECKING:
    from rlhf.config.task import TLDRMiniConfig


@dataclass(frozen=True, slots=True)
class Slot:
    """A kind of fact, with templates of texts in which `_` stands for the value of the fact."""

    name: str
    values: tuple[str, ...]
    facts: tuple[str, ...]  # sentences of a post that state the fact
    distractors: tuple[str, ...]  # sentences that mention a wrong value
    title: str  # title of a post that states the fact
    phrase: str  # how a summary states the fact
    vague: str  # how a summary mentions the fact without its value


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SLOTS = (
    Slot(
        name="who",
        values=_words(
            "sister brother mother father cousin uncle aunt boss coworker roommate neighbor landlord "
            "girlfriend "
            "boyfriend wife husband teacher nephew niece tenant"
        ),
        facts=("My _ and I were close.", "My _ is to blame.", "My _ did this to me."),
        distractors=(
            "Ask any _ and they will agree.",
            "A _ of theirs took my side.",
            "Every _ has been there.",
        ),
        title="Trouble with My _",
        phrase="My _",
        vague="Someone",
    ),
    Slot(
        name="deed",
        values=_words(
            "stole sold broke misplaced hid burned painted borrowed scratched traded dropped pawned ruined "
            "kept wrecked "
            "cleaned returned rented buried drowned"
        ),
        facts=("They just _ it without asking.", "And then they just _ it.", "For no reason they just _ it."),
        distractors=("Before that they never _ anything.", "They once _ a toy.", "I have not _ a thing."),
        title="They just _ it",
        phrase="just _",
        vague="took",
    ),
    Slot(
        name="thing",
        values=_words(
            "car bike laptop phone guitar watch camera couch piano ring boat tent drone desk lamp "
            "skateboard necklace "
            "jacket printer bracelet"
        ),
        facts=("I had saved up for my _.", "All I want is my _ back.", "I love my _ a lot."),
        distractors=("They have a _ too.", "I once lent them a _.", "It was never about one _."),
        title="About my _",
        phrase="my _",
        vague="my stuff",
    ),
    Slot(
        name="when",
        values=_words(
            "monday tuesday wednesday thursday friday saturday sunday january february march april may "
            "june july "
            "august september october november december"
        ),
        facts=("It happened last _.", "All of this was last _.", "The big day was last _."),
        distractors=("I was out of town until _.", "We had a good time in _.", "I was sick before _."),
        title="What happened last _",
        phrase="last _",
        vague="recently",
    ),
    Slot(
        name="where",
        values=_words(
            "gym office park mall airport church school beach bar library hotel hospital garage bakery "
            "zoo station "
            "theater lake museum farm"
        ),
        facts=("We were at the _.", "It took place at the _.", "They all saw it at the _."),
        distractors=("I work in a _.", "We first met in a _.", "There is a _ next door."),
        title="What they did at the _",
        phrase="at the _",
        vague="somewhere",
    ),
    Slot(
        name="why",
        values=_words(
            "wedding divorce rent exam baby funeral debt promotion party trip illness bet storm strike "
            "holiday puppy "
            "concert election lottery graduation"
        ),
        facts=("It was because of their _.", "They blame it on their _.", "They did it for their _."),
        distractors=("I have been busy with a _.", "I had to pay for this _.", "Nobody talks about this _."),
        title="All for their _",
        phrase="because of their _",
        vague="for some reason",
    ),
    Slot(
        name="worth",
        values=_words("50 80 120 180 250 350 500 700 1000 1500 2000 3000"),
        facts=(
            "It was worth _ dollars.",
            "They know that it was worth _ dollars.",
            "I think it is worth _ dollars.",
        ),
        distractors=("I make _ dollars a week.", "They owe me _ dollars.", "My taxes are _ dollars."),
        title="It was worth _ dollars",
        phrase="worth _ dollars",
        vague="worth a lot",
    ),
    Slot(
        name="feeling",
        values=_words(
            "angry sad hurt furious ashamed guilty lonely confused jealous scared tired anxious "
            "betrayed bitter numb "
            "worried hopeless nervous annoyed shocked"
        ),
        facts=("Now I feel _.", "I feel _ about it.", "All of this made me feel _."),
        distractors=("They seem _ as well.", "My friends are _ for me.", "They called me _."),
        title="I feel _",
        phrase="I feel _",
        vague="I feel bad",
    ),
    Slot(
        name="age",
        values=tuple(str(age) for age in range(18, 38)),
        facts=("I am _ years old.", "I am _ if that matters.", "I am _ now."),
        distractors=("They are _ years old.", "They turned _ this year.", "Most people there are _ or so."),
        title="I am _ and stuck",
        phrase="I am _",
        vague="I am young",
    ),
    Slot(
        name="ask",
        values=_words(
            "forgive sue confront ignore report avoid block evict trust warn fire call fight leave "
            "invite expose "
            "punish dump question repay"
        ),
        facts=(
            "I wonder if I should _ them.",
            "I think that I should _ them.",
            "I do not know if I should _ them.",
        ),
        distractors=("My friends would _ them.", "I could never _ them.", "They tried to _ me."),
        title="If I should _ them",
        phrase="Maybe I should _ them.",
        vague="What now?",
    ),
)
BY_NAME = {slot.name: slot for slot in SLOTS}
SLOT_OF = {value: slot for slot in SLOTS for value in slot.values}
BACKBONE = ("who", "deed", "thing")  # slots in every summary, at least vaguely: "Someone took my stuff."
FILLER = (
    "Sorry for the long post.",
    "I do not know where to start.",
    "Please be nice.",
    "I can not sleep at night.",
    "It is hard to put this into words.",
    "I typed this in a hurry.",
    "Thank you for reading all of this.",
    "Some of you will think that I am wrong.",
)
_FOCUS = {  # slots by relevance in a subreddit, most relevant first; half of a post's slots are relevant
    "r/relationships": _words("who feeling ask why age when deed where thing worth"),
    "r/legaladvice": _words("deed when ask thing worth where who age why feeling"),
    "r/tifu": _words("where deed when thing age why feeling who worth ask"),
    "r/offmychest": _words("feeling why who when age where ask thing deed worth"),
    "r/personalfinance": _words("thing why where deed worth ask age feeling when who"),
    "r/advice": _words("ask thing feeling where worth who deed age when why"),
}
_RELEVANT_ODDS = -0.6  # log-odds that a reference states a relevant fact exactly
_IRRELEVANT_ODDS = -1.8  # log-odds that a reference states any other fact exactly
_HABIT_ODDS = 0.5  # largest change of these two log-odds by the habit of a subreddit
_VAGUE_SHARE = 0.9  # share of facts not stated exactly that are stated vaguely; the rest is skipped
_FILLER_SHARE = 0.2  # share of references with a filler sentence
_WRONG_SHARE = 0.03  # share of exactly stated facts that have a wrong value


def relevant_slots(subreddit: str, names: list[str]) -> list[str]:
    """Return the relevant half of the slots `names` in a subreddit, most relevant first."""
    return [name for name in _FOCUS.get(subreddit, names) if name in names][: len(names) // 2]


@cache
def habits(subreddit: str, slots: tuple[str, ...]) -> dict[str, float]:
    """Return the habit of a subreddit: slot -> change of the log-odds that a reference states the fact.

    The changes are evenly spaced from -HABIT_ODDS to HABIT_ODDS, in a random order that only the subreddit
    and the slots determine.
    """
    order = list(slots)
    random.Random(f"habits/{subreddit}").shuffle(order)
    return {name: _HABIT_ODDS * (2 * rank / (len(order) - 1) - 1) for rank, name in enumerate(order)}


@dataclass(frozen=True, slots=True)
class Level:
    """The settings of a difficulty."""

    subreddits: int  # number of subreddits, the first of FOCUS
    slots: tuple[str, ...]  # slots of a post
    values: int  # number of values of each slot
    distractors: int  # distractors in a post
    filler: int  # filler sentences in a post


LEVELS = {
    Difficulty.easy: Level(2, ("who", "deed", "thing", "when", "feeling", "ask"), 10, 0, 2),
    Difficulty.medium: Level(3, ("who", "deed", "thing", "when", "where", "why", "feeling", "ask"), 16, 1, 2),
    Difficulty.hard: Level(len(_FOCUS), tuple(BY_NAME), 20, 3, 2),
}


@dataclass(frozen=True, slots=True)
class Post:
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


def make_post(rng: random.Random, level: Level) -> Post:
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
    return Post(
        subreddit=rng.choice(list(_FOCUS)[: level.subreddits]),
        title=rng.choice(level.slots),
        facts=facts,
        distractors=distractors,
        sentences=tuple(sentences),
    )


def make_reference(rng: random.Random, post: Post) -> str:
    """Return a random reference: a flawed summary of the post."""
    usual = habits(post.subreddit, tuple(post.facts))
    relevant = relevant_slots(post.subreddit, list(post.facts))
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


class TLDRMiniSource(EmbeddedSource):
    """A source of posts and references, generated from `task.data_seed`, and of pairs from a folder."""

    config: TLDRMiniConfig
    pattern = _TOKEN_PATTERN

    @classmethod
    @cache
    def vocabulary(cls) -> tuple[str, ...]:
        """Return every token of the generated texts except special tokens. Words begin with a space."""
        texts = [*FILLER, *_FOCUS, "What now?"]
        for slot in SLOTS:
            texts += [*slot.values, slot.title, slot.phrase, slot.vague, *slot.facts, *slot.distractors]
        pieces = {
            piece for text in texts for piece in re.findall(_TOKEN_PATTERN, f" {text}") if piece.strip(" _")
        }
        return (*_HEADINGS, "\n\n", *sorted(pieces))

    def generate(self, split: str, size: int) -> dict[str, list[str]]:
        """Return `size` posts with flawed references; a larger `size` only appends examples."""
        rng = random.Random(f"tldr_mini/{self.config.data_seed}/{split}")  # noqa: S311
        rows: dict[str, list[str]] = {"query": [], "reference_response": []}
        for _ in range(size):
            post = make_post(rng, LEVELS[self.config.difficulty])
            rows["query"].append(post.query)
            rows["reference_response"].append(make_reference(rng, post))
        return rows
