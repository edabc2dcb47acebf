"""The metric that a run reports to sweepers."""

import pytest

from rlhf.words.compose import compose

LOCAL = "task=local task.path=x.jsonl model.policy=x"
MIXTURE = (
    "task=mixture model.policy=x +schema/task@task.parts.a=arithmetic +schema/task@task.parts.b=gsm8k "
    "scorer=mixture +scorer@scorer.parts.a=answer +scorer@scorer.parts.b=answer "
    "scorer@gold=mixture +scorer@gold.parts.a=answer +scorer@gold.parts.b={}"
)


@pytest.mark.parametrize(
    ("overrides", "metric"),
    [
        ("algo=grpo task=arithmetic", "eval/accuracy"),
        ("algo=grpo task=gsm8k model.policy=x", "eval/accuracy"),
        ("algo=grpo task=reasoning_gym", "eval/accuracy"),
        ("algo=sft task=arithmetic", "eval/accuracy"),
        ("algo=dpo generator=dataset task=arithmetic", "eval/accuracy"),
        (f"algo=grpo {LOCAL} scorer=answer", "eval/accuracy"),
        (f"algo=grpo {LOCAL} scorer=answer scorer@gold=answer", "eval/accuracy"),
        (f"algo=grpo {LOCAL} scorer=answer scorer@gold=reward_model gold.path=x", "eval/win_rate"),
        (f"algo=grpo {LOCAL} scorer=function scorer.path=math:fsum", "eval/score"),
        (f"algo=grpo {MIXTURE.format('answer')}", "eval/accuracy"),
        (f"algo=grpo {MIXTURE.format('answer gold.parts.b.weight=2')}", "eval/win_rate"),
        (f"algo=grpo {MIXTURE.format('reward_model gold.parts.b.path=x')}", "eval/win_rate"),
        ("algo=dpo task=tldr_mini", "eval/win_rate"),
        ("algo=sft task=tldr_mini scorer@gold=none", "eval/loss"),
        ("algo=grpo task=arithmetic objective_metric=eval/gold_score", "eval/gold_score"),
    ],
)
def test_a_sweep_optimises_the_accuracy_where_answers_are_checked(overrides, metric):
    assert compose(overrides.split()).metric == metric
