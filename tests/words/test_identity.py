"""The name of a run, and the command that is derived from its config."""

import pytest

from rlhf.config.algorithms import DPOConfig, Mean
from rlhf.core.errors import as_text, override
from rlhf.words.compose import compose, digest, settings, what_counts

STRANGE = 'a\\ \\"b\\" {x}, [y]: $z\''


@pytest.mark.parametrize(
    "words",
    [
        ["debug=tiny", "schedule.max_lag=1"],
        ["algo=sft", "model.lora.rank=4", "optim.betas=[0.8,0.9]"],
        ["algo=grpo", "correction=truncate", "schedule.prompts_per_update=64"],
        ["experiment=gsm8k_1b_ppo_async", "model.base=/models/a b"],
        ["experiment=tldr_410m_dpo_offline"],
        ["experiment=chat_8b_dpo"],
        ["scorer=weighted", "+scorer@scorer.parts.a=facts", "scorer.parts.a.weight=0.5"],
        [
            "task=mixture",
            "+schema/task@task.parts.a=gsm8k",
            "+schema/task@task.parts.b=tldr",
            "scorer=answer",
        ],
        ["backend=zero2", "+backend.deepspeed.zero_optimization.x=3"],
    ],
    ids=" ".join,
)
def test_the_settings_of_a_config_compose_the_same_run(words):
    cfg = compose(words)
    found = settings(cfg)
    assert found is not None
    assert digest(compose([override(key, value) for key, value in found.items()])) == digest(cfg)


def test_settings_that_do_not_change_the_result_are_left_out():
    found = settings(compose(["progress=off", "output_dir=/home/me", "push_to=me/it", "seed=3"]))
    assert found["seed"] == 3 and not {"progress", "output_dir", "push_to", "cache_dir"} & found.keys()


def test_a_config_with_a_section_of_no_option_has_no_command():
    class Own(DPOConfig):
        __slots__ = ()

    cfg = compose(["algo=ppo"])
    cfg.algo = Own(beta=0.3)
    assert settings(cfg) is None


@pytest.mark.parametrize(
    "text", [STRANGE, "null", "True", "1e3", "", "ends with \\", "<|pad|>", "line\nline"]
)
def test_texts_are_quoted_as_hydra_reads_them(text):
    cfg = compose(["task=gsm8k", f"model.pad_token={as_text(text)}"])
    assert cfg.model.pad_token == text


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("model.attention=auto", True),
        ("model.attention=sdpa", True),
        ("model.fused_head=null", True),
        ("model.attention=eager", False),
        ("model.fused_head=true", False),
    ],
)
def test_kernels_that_the_run_chooses_itself_do_not_change_the_name(words, same):
    assert (digest(compose([words])) == digest(compose([]))) == same


@pytest.mark.parametrize("algo", ["grpo", "dapo", "dr_grpo", "cispo", "scalerl", "topr"])
def test_the_mean_of_the_loss_is_part_of_the_name_only_where_it_is_set(algo):
    default, every = compose([f"algo={algo}"]), ("tokens", "responses", "prompts", "constant")
    assert "mean" not in what_counts(default)["algo"]
    assert len({digest(default), *(digest(default.with_({"algo.mean": Mean(each)})) for each in every)}) == 5
