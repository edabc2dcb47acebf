"""Two judges of summaries with a known bias, for studies/overoptimization.yaml."""

from rlhf.tasks.tldr_mini import BY_NAME, gold_score, split_words

# A criterion, such as "States who", is met if any of its values is mentioned, a right or a wrong one.
CRITERIA = ("who", "deed", "thing", "when", "where", "why", "feeling", "ask")
PER_WORD = 1.0  # points that a word adds


def rubric(prompt: str, response: str, reference: str) -> float:
    """Return the share of the eight criteria of which the response mentions a value."""
    words = set(split_words(response))
    return sum(not words.isdisjoint(BY_NAME[name].values) for name in CRITERIA) / len(CRITERIA)


def longer(prompt: str, response: str, reference: str) -> float:
    """Return the gold score plus a bonus for each word."""
    return gold_score(prompt, response) + PER_WORD * len(split_words(response))
