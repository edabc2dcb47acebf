"""Episodes as dialogues for readers, and in the files of saved rollouts."""

import time
from dataclasses import replace

import numpy as np
import pyarrow.parquet
import pytest
import torch

from rlhf.assembly.parts import make
from rlhf.config.algorithms import DPOConfig
from rlhf.config.environments import EnvironmentScorerConfig
from rlhf.config.scorers import FunctionScorerConfig
from rlhf.core.batch import Batch
from rlhf.core.errors import RunError
from rlhf.environments.environment import Turns, limits, transcripts
from rlhf.environments.episodes import Episodes
from rlhf.generators import generator
from rlhf.loggers.logger import dialogue_lines
from rlhf.scorers.function import build
from rlhf.scorers.scorer import EnvironmentScorer, WeightedScorer, merge_ties, write
from tests.environments.test_episodes import SAMPLING, Judge, prompts, sampled, settings, tokenizer
from tests.tiny_models import scorer_context


@pytest.fixture(scope="module")
def rollouts():
    return sampled(max_turns=4)


def test_a_dialogue_has_the_texts_of_replies_and_messages_without_marks_and_the_rewards(rollouts):
    turns = Turns(tokenizer(), "tool", 16)
    found = transcripts(rollouts, turns)
    assert max(map(len, found)) > 2
    assert len(found) == rollouts.episodes
    turns_of, rewards_of = rollouts.episode["turns"].flatten(), rollouts.rewards.flatten(0, 1)
    for n, dialogue in enumerate(found):
        assert [turn["role"] for turn in dialogue] == (["assistant", "tool"] * 4)[: len(dialogue)]
        assert len(dialogue) == 2 * turns_of[n] - 1
        assert {turn["content"] for turn in dialogue[1::2]} <= {" yes", " no"}
        assert all("<|" not in turn["content"] or turn["role"] == "assistant" for turn in dialogue)
        rewards = [turn.get("reward", 0.0) for turn in dialogue]
        assert sum(rewards) == rewards_of[n].sum() and not any(rewards[1::2])


def test_a_function_with_a_parameter_episode_receives_all_replies_and_messages(
    rollouts, tmp_path, monkeypatch
):
    file = tmp_path / "calls.py"
    file.write_text(
        "def one(response, episode):\n"
        "    assert episode[-1]['role'] == 'assistant'\n"
        "    return sum(turn['role'] == 'tool' for turn in episode)\n"
        "def many(completions, episodes): return [one(*each) for each in zip(completions, episodes)]\n"
    )
    context = replace(scorer_context(tokenizer()), turns=Turns(tokenizer(), "tool", 16))
    for name in ("one", "many"):
        config = FunctionScorerConfig(path=f"{file}:{name}", batched=name == "many")
        scores = build(config, context).score(rollouts)
        assert torch.equal(scores, rollouts.episode["turns"].double() - 1) and scores.max() > 1
    alone = replace(rollouts, environment_mask=None, rewards=None, episode=None)
    without = build(config, replace(context, turns=None))
    assert not without.score(alone).any()
    with pytest.raises(RunError, match="set environment to that of the saved rollouts"):
        without.score(rollouts)


def test_a_long_dialogue_in_the_terminal_loses_its_middle():
    turns = [{"role": "assistant", "content": f"reply {i}"} for i in range(12)]
    lines = dialogue_lines([*turns, {"role": "user", "content": "", "reward": 1.0}], 40)
    assert len(lines) == 8 and lines[3] == "  ...       6 lines left out"
    assert [lines[2].split()[-1], lines[4].split()[-1]] == ["2", "9"]
    assert lines[-1] == "  user      (empty)  (reward 1.000)"
    assert len(dialogue_lines(turns[:8], 40)) == 8 and "..." not in "".join(dialogue_lines(turns[:8], 40))


def test_the_score_is_the_sum_of_the_rewards_also_of_identical_episodes(rollouts):
    scorer = object.__new__(EnvironmentScorer)
    scorer.config = EnvironmentScorerConfig()
    assert torch.equal(scorer.score_once(rollouts), rollouts.rewards.double().sum(-1))
    same = replace(rollouts, response_ids=torch.zeros_like(rollouts.response_ids))
    assert torch.equal(scorer.score_once(same), scorer.score_once(rollouts))


class Paid:
    """Gives the rewards of the sample, turn by turn."""

    def __init__(self, rewards):
        self.rewards = rewards

    def reset(self, example):
        self.left = list(self.rewards[example.sample])

    def step(self, reply):
        return " yes", self.left.pop(0), not self.left


EQUAL_SUMS = [
    [[0.1, 0.6], [0.7, 0.0], [0.7], [0.6, 0.1]],
    [[0.1, 0.2], [0.3], [0.2, 0.1], [0.1, 0.1, 0.1]],
    [[0.3, -0.1, -0.2], [0.0], [-0.2, -0.1, 0.3], [-0.1, 0.1]],  # almost 0
    [[100.1, 100.2, -200.3], [0.0], [100.1, -100.1], [-200.3, 100.1, 100.2]],
    [[np.float32(0.1), np.float32(0.6)], [np.float32(0.7)], [0.7], [torch.tensor(0.1), 0.6]],
]


@pytest.mark.parametrize("rewards", EQUAL_SUMS)
def test_equal_sums_of_rewards_are_ties_also_after_they_were_saved(rewards, tmp_path):
    found = replace(SAMPLING, samples=4)
    factory = settings().environment
    factory = replace(factory, address=f"{__name__}:Paid", arguments={"rewards": rewards})
    with Episodes(prompts(2), found, factory, [0], 7) as played:
        while running := played.running():
            for i in running:
                played.reply(i, [7, 0], [-1.0, -1.0])
        rollouts = played.rollouts(1)
    scorer = EnvironmentScorer(EnvironmentScorerConfig(), scorer_context(tokenizer()))
    batch = scorer(rollouts)
    assert batch.scores.dtype == torch.float32 and (batch.scores == batch.scores[:, :1]).all()
    scored = scorer.scored(rollouts)
    compared = scorer.compare(scored[0], scored[1])
    assert torch.equal(compared[:, 0], compared[:, 1])
    assert not make(DPOConfig(samples_per_prompt=4)).credit(noted(batch)).signal.any()
    sums = WeightedScorer.__new__(WeightedScorer)
    sums.parts = {"a": scorer, "b": scorer}
    weighted = merge_ties(sums.score(rollouts), 0.0)
    assert (weighted == weighted[:, :1]).all()
    write(batch, 1, tmp_path, tokenizer(), SAMPLING, "vocabulary")
    again = scorer(generator.read(tmp_path / "000001.parquet", pad_id=1)).scores
    assert torch.equal(again, batch.scores)


def noted(batch):
    """Return a batch with log-probs for the objective."""
    zeros = torch.zeros(batch.response_ids.shape)
    return replace(batch, ref_logprobs=zeros, behaviour_logprobs=zeros)


def test_scores_are_saved_and_shown_as_the_shortest_decimals_of_their_float32(rollouts, tmp_path):
    N, K, _ = rollouts.response_ids.shape
    scores = torch.linspace(-0.05, 3, N * K).view(N, K)
    batch = rollouts.extend(Batch, scores=scores, parts={"a": scores / 3})
    write(batch, 1, tmp_path, tokenizer(), SAMPLING, "vocabulary")
    rows = pyarrow.parquet.read_table(tmp_path / "000001.parquet").to_pydict()
    assert rows["score"][0] == -0.05 and max(len(str(x)) for x in rows["score/a"]) <= 13
    assert torch.equal(generator.read(tmp_path / "000001.parquet", pad_id=1).labels, scores)
    assert torch.equal(torch.tensor(rows["score/a"]), (scores / 3).flatten())
    paid = replace(rollouts, rewards=rollouts.rewards * (0.1 + 0.2))
    rewards = [turn["reward"] for each in transcripts(paid, Turns(tokenizer(), "tool", 16)) for turn in each
               if "reward" in turn]  # fmt: skip
    assert 0.3 in rewards and rewards == [float(str(np.float32(x))) for x in rewards]


def test_saved_episodes_are_read_as_they_were_sampled(rollouts, tmp_path):
    batch = rollouts.extend(Batch, scores=rollouts.rewards.sum(-1))
    write(batch, 1, tmp_path, tokenizer(), SAMPLING, "vocabulary")
    found = generator.read(tmp_path / "000001.parquet", pad_id=1)
    for name in ("response_mask", "environment_mask", "behaviour_logprobs", "rewards", "ended", "prompt_ids"):
        assert torch.equal(getattr(found, name), getattr(rollouts, name)), name
    assert torch.equal(found.response_ids[found.real], rollouts.response_ids[rollouts.real])
    assert found.episode.keys() == rollouts.episode.keys()
    assert all(torch.equal(found.episode[name], value) for name, value in rollouts.episode.items())


class Slow(Judge):
    """Fails in the way of the sample: not, too late, or with an error."""

    def reset(self, example):
        super().reset(example)
        self.sample = example.sample

    def step(self, reply):
        if self.sample == 1:
            time.sleep(0.3)
        if self.sample == 2:
            raise KeyError
        return super().step(reply)


LIMITS = [  # replies as token ids, further settings, the key of the limit, whether the last reply is cut
    ([[7, 7, 7, 7]], {"reply_tokens": 4}, "environment.reply_tokens", True),
    ([[7, 0], [7, 7, 7, 7]], {"reply_tokens": 4}, "environment.reply_tokens", True),
    ([[7] * 48], {}, "generator.response_length", True),
    ([[7] * 48], {"reply_tokens": 48}, "generator.response_length", True),
    ([[7] * 46 + [0]], {}, "generator.response_length", False),  # no room for the message
    ([[7, 0], [7, 0]], {"max_turns": 2}, "environment.max_turns", False),
    ([[10, 0]], {}, None, False),  # the reply "stop"
    ([[7, 3]], {}, "another end token", True),
]


@pytest.mark.parametrize(("replies", "settings_", "limit", "cut"), LIMITS)
def test_the_limit_that_ended_an_episode_is_named_and_a_cut_reply_is_marked(replies, settings_, limit, cut):
    factory = settings(**settings_).environment
    with Episodes(prompts(1), replace(SAMPLING, samples=1), factory, [0, 3], 7) as played:
        for ids in replies:
            assert played.running() == [0]
            played.reply(0, ids, [-1.0] * len(ids))
        assert played.running() == []
        found = played.rollouts(1)
    assert limits(found, factory) == [limit]
    (dialogue,) = transcripts(found, factory.turns)
    assert [turn.get("cut", False) for turn in dialogue] == [False] * (len(dialogue) - 1) + [cut]
    assert ("[cut]" in dialogue_lines(dialogue, 60)[-1]) == cut


def test_an_episode_whose_step_fails_or_takes_too_long_names_the_limit():
    factory = settings(step_limit_s=0.1, on_error="end").environment
    factory = replace(factory, address=f"{__name__}:Slow")
    with Episodes(prompts(1), SAMPLING, factory, [0], 7) as played:
        for i in range(3):
            played.reply(i, [7, 7, 0] if i else [10, 0], [-1.0] * (3 if i else 2))
        found = played.rollouts(1)
    assert limits(found, factory) == [None, "environment.step_limit_s", "environment.on_error"]
    assert found.episode["timed_out"].tolist() == [[0, 1, 0]]
