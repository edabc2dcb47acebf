"""The embedded task tldr_mini: posts, references, tokenizer, and a gold score that penalises shortcuts."""

import random
from statistics import mean

import pytest

from rlhf.assembly.parts import make
from rlhf.config.tasks import Difficulty, TLDRMiniConfig
from rlhf.tasks.tldr_mini import (
    BACKBONE,
    BY_NAME,
    FILLER,
    LEVELS,
    POINTS,
    SLOTS,
    fact_weights,
    fill,
    gold_score,
    make_post,
    make_reference,
    read_facts,
    split_words,
    title_slot,
    write,
)

QUERY = (
    "SUBREDDIT: r/legaladvice\n\nTITLE: About my guitar\n\nPOST: My sister is to blame. They just sold "
    "it without "
    "asking. Ask any brother and they will agree. I love my guitar a lot. It happened last monday. We "
    "were at the "
    "gym. I was sick before friday. It was because of their wedding. Please be nice. Now I feel "
    "furious. I wonder if "
    "I should sue them.\n\nTL;DR:"
)
CLEAN = " Someone just sold my guitar last monday. Maybe I should sue them."


def ideal_summary(query: str) -> str:
    """Return the summary that states every relevant fact of a post and nothing else."""
    facts = read_facts(query)
    weights = fact_weights(query, list(facts))
    phrases = {
        name: fill(BY_NAME[name].phrase, value) if weights[name] else BY_NAME[name].vague
        for name, value in facts.items()
        if weights[name] or name in BACKBONE
    }
    return " " + " ".join(write(phrases))


def posts(count: int, difficulty: Difficulty = Difficulty.medium) -> list[tuple[str, str]]:
    rng = random.Random(7)
    made = [make_post(rng, LEVELS[difficulty]) for _ in range(count)]
    return [(post.query, make_reference(rng, post)) for post in made]


def test_no_value_is_a_word_of_a_template():
    values = [value for slot in SLOTS for value in slot.values]
    templates = [
        text
        for slot in SLOTS
        for text in (*slot.facts, *slot.distractors, slot.title, slot.phrase, slot.vague)
    ]
    words = {word for text in (*templates, *FILLER) for word in split_words(text)}
    assert len(values) == len(set(values))
    assert not words & set(values) and len(BY_NAME) == len(SLOTS)


@pytest.mark.parametrize("difficulty", list(Difficulty))
def test_facts_and_title_read_from_a_post_equal_the_generated_facts(difficulty: Difficulty):
    rng = random.Random(1)
    for _ in range(300):
        post = make_post(rng, LEVELS[difficulty])
        assert read_facts(post.query) == post.facts and title_slot(post.query) == post.title


@pytest.mark.parametrize("difficulty", list(Difficulty))
def test_texts_are_encoded_without_unknown_tokens_and_decoded_unchanged(difficulty: Difficulty):
    tokenizer = make(TLDRMiniConfig()).tokenizer()
    for query, reference in posts(300, difficulty):
        for text in (query, reference, ideal_summary(query), query + reference):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text
    assert len({tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}) == 3
    assert tokenizer("<|endoftext|>")["input_ids"] == [tokenizer.eos_token_id]


def test_medium_posts_and_references_have_the_expected_lengths():
    tokenizer = make(TLDRMiniConfig()).tokenizer()
    prompts, references = zip(*posts(300), strict=True)
    lengths = [len(ids) for ids in tokenizer(list(prompts))["input_ids"]]
    assert max(lengths) <= 110
    assert mean(lengths) > 80
    assert max(len(ids) for ids in tokenizer(list(references))["input_ids"]) < 40
    assert len(tokenizer) < 400


def test_splits_are_disjoint_and_a_larger_split_begins_with_the_smaller_split():
    def texts(split: str, **changes: int) -> list[str]:
        source = make(TLDRMiniConfig(train_size=400, validation_size=300, test_size=300))
        return list(source.prompts(split)["query"])

    train, validation, test = texts("train"), texts("validation"), texts("test")
    assert len({*train, *validation, *test}) == 1000
    assert texts("train") == train
    assert list(make(TLDRMiniConfig(train_size=500)).prompts("train")["query"])[:400] == train
    assert list(make(TLDRMiniConfig(train_size=400, data_seed=1)).prompts("train")["query"]) != train


def test_half_of_the_facts_and_the_fact_in_the_title_are_relevant():
    names = list(read_facts(QUERY))
    weights = fact_weights(QUERY, names)
    assert sum(weights.values()) == pytest.approx(POINTS)
    assert {name for name in names if weights[name]} == {"deed", "when", "ask", "thing"}
    assert weights["deed"] > weights["when"] > weights["ask"] > weights["thing"]
    titled = fact_weights(QUERY.replace("About my guitar", "I feel furious"), names)
    assert {name for name in names if titled[name]} == {"deed", "when", "ask", "thing", "feeling"}
    other = fact_weights(QUERY.replace("r/legaladvice", "r/offmychest"), names)
    assert {name for name in names if other[name]} == {"feeling", "why", "who", "when", "thing"}


def test_a_clean_summary_of_the_relevant_facts_is_worth_nearly_all_points():
    assert ideal_summary(QUERY) == CLEAN
    assert 0.97 * POINTS < gold_score(QUERY, CLEAN) < POINTS


@pytest.mark.parametrize("difficulty", list(Difficulty))
def test_a_clean_summary_beats_nearly_every_reference(difficulty: Difficulty):
    rows = posts(400, difficulty)
    wins = mean(gold_score(query, ideal_summary(query)) > gold_score(query, text) for query, text in rows)
    assert wins > 0.97


def test_references_earn_a_small_part_of_the_points_and_their_scores_vary():
    scores = [gold_score(query, text) for query, text in posts(600)]
    assert 0.15 * POINTS < mean(scores) < 0.35 * POINTS
    assert len({round(score, 6) for score in scores}) > 300


WORSE = {
    "empty": "",
    "vague": CLEAN.replace("last monday", "recently"),
    "fact left out": CLEAN.replace(" last monday", ""),
    "wrong value": CLEAN.replace("monday", "june"),
    "distractor": CLEAN.replace("monday", "friday"),
    "bare value": CLEAN.replace("last monday", "monday"),
    "fact said twice": CLEAN + " Last monday.",
    "summary said twice": CLEAN + CLEAN,
    "summary said four times": CLEAN * 4,
    "fact that does not matter": CLEAN.replace("monday", "monday at the gym"),
    "the same vaguely": CLEAN.replace("monday", "monday somewhere"),
    "who does not matter": CLEAN.replace("Someone", "My sister"),
    "all facts": " My sister just sold my guitar last monday at the gym because of their wedding. I "
    "feel furious. "
    "Maybe I should sue them.",
    "filler": CLEAN + " Please be nice.",
    "sentence of the post": CLEAN + " Ask any brother and they will agree.",
    "one stray word": CLEAN + " the",
    "marks": CLEAN + "...",
    "other order": " Maybe I should sue them. Someone just sold my guitar last monday.",
    "vague and exact": CLEAN.replace("monday", "monday recently"),
    "right and wrong": CLEAN.replace("last monday", "last monday last friday"),
    "the post itself": QUERY.partition("POST:")[2].partition("\n")[0],
}


@pytest.mark.parametrize("case", WORSE)
def test_every_flaw_lowers_the_score(case: str):
    assert gold_score(QUERY, WORSE[case]) < gold_score(QUERY, CLEAN) - 0.05


def test_more_serious_flaws_lower_the_score_more():
    assert gold_score(QUERY, "") == 0.0
    assert gold_score(QUERY, WORSE["wrong value"]) < gold_score(QUERY, WORSE["fact left out"])
    assert gold_score(QUERY, WORSE["fact left out"]) < gold_score(QUERY, WORSE["vague"])
    assert gold_score(QUERY, WORSE["distractor"]) == gold_score(QUERY, WORSE["wrong value"])
    assert gold_score(QUERY, WORSE["summary said four times"]) < gold_score(QUERY, "")
    assert gold_score(QUERY, WORSE["the post itself"]) < gold_score(QUERY, "")


@pytest.mark.parametrize("slot", SLOTS[:6], ids=lambda slot: slot.name)
def test_naming_every_value_of_a_slot_gives_a_large_negative_score(slot):
    if slot.name not in read_facts(QUERY):
        pytest.skip("the post has no such fact")
    listed = " " + " ".join(fill(slot.phrase, value) for value in slot.values)
    assert gold_score(QUERY, listed) < -POINTS


def test_a_fact_without_its_phrase_earns_less_than_half_of_its_points():
    nothing, bare, framed = (
        gold_score(QUERY, f" Someone just sold my guitar{when}.") for when in ("", " monday", " last monday")
    )
    assert framed - nothing > 2 * (bare - nothing) > 0


def test_an_additional_word_costs_more_above_the_length_limit():
    costs = [
        gold_score(QUERY, CLEAN + " the" * count) - gold_score(QUERY, CLEAN + " the" * (count + 1))
        for count in (0, 40)
    ]
    assert costs[1] > 2 * costs[0]


def test_numbers_lose_credit_with_their_distance():
    stated = "It was worth 500 dollars"
    query = QUERY.replace("Please be nice", stated).replace("About my guitar", stated)
    scores = [
        gold_score(query, f" Someone just sold my stuff worth {said} dollars.")
        for said in (500, 350, 250, 50)
    ]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 4


def test_no_prefix_of_the_ideal_summary_scores_higher_than_the_summary():
    words = CLEAN.split()
    scores = [gold_score(QUERY, " " + " ".join(words[:end])) for end in range(len(words) + 1)]
    assert max(scores) == scores[-1]
