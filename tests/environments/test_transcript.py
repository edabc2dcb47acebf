"""Episodes as dialogues for readers, and in the files of saved rollouts."""

from dataclasses import replace

import pytest
import torch

from rlhf.config.environment import EnvironmentScorerConfig
from rlhf.config.scorer import FunctionScorerConfig
from rlhf.core.batch import Batch
from rlhf.core.errors import RunError
from rlhf.environments.transcript import transcripts
from rlhf.environments.turns import Turns
from rlhf.generators import stored
from rlhf.loggers.display import dialogue_lines
from rlhf.scorers.function import build
from rlhf.scorers.saved import write
from rlhf.scorers.scorer import EnvironmentScorer
from tests.environments.test_episodes import SAMPLING, sampled, tokenizer
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


def test_saved_episodes_are_read_as_they_were_sampled(rollouts, tmp_path):
    batch = rollouts.extend(Batch, scores=rollouts.rewards.sum(-1))
    write(batch, 1, tmp_path, tokenizer(), SAMPLING, "vocabulary")
    found = stored.read(tmp_path / "000001.parquet", pad_id=1)
    for name in ("response_mask", "environment_mask", "behaviour_logprobs", "rewards", "ended", "prompt_ids"):
        assert torch.equal(getattr(found, name), getattr(rollouts, name)), name
    assert torch.equal(found.response_ids[found.real], rollouts.response_ids[rollouts.real])
    assert found.episode.keys() == rollouts.episode.keys()
    assert all(torch.equal(found.episode[name], value) for name, value in rollouts.episode.items())
