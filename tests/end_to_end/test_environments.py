"""Runs whose responses are episodes: schedules, processes, resume, evaluation and saved rollouts."""

from __future__ import annotations

import json
import shutil
import signal

import pytest
from safetensors.torch import load_file

from rlhf import Hook, StopRun
from rlhf.checks.check import problems
from rlhf.core.errors import UserError
from rlhf.models.loading import save
from rlhf.runs.folder import RunFolder
from rlhf.stages.evaluation import changed, evaluate
from rlhf.stages.run import run
from rlhf.words.compose import compose, run_name
from tests.end_to_end.conftest import assert_same_end, nightly, rows, wait_for
from tests.end_to_end.test_survival import finish, start
from tests.environments.templates import family
from tests.environments.test_tools import TEMPLATE
from tests.tiny_models import tiny_lm

SFT = (  # enough for calls and answers
    *("schedule.total_episodes=512", "schedule.prompts_per_update=32", "schedule.eval_every=0"),
    *("backend.micro_batch=32", "optim.lr=2e-3"),
)
EPISODES = (*("task=calculator", "generator.response_length=48"), f"stages.sft=[{','.join(map(repr, SFT))}]")
LAG = (
    *EPISODES,
    "algo=dpo",
    "algo.ties=keep",
    "schedule.max_lag=1",
    "schedule.total_episodes=96",
    "schedule.save_every=1",
)
SAVED = (*EPISODES, "algo=grpo", "save_generations=true")


def updates(folder: RunFolder) -> list[dict]:
    return [row for row in rows(folder) if "lr" in row]


@pytest.mark.smoke
def test_a_run_has_the_figures_of_its_episodes_and_stores_dialogues(finished):
    folder = finished(*SAVED)
    first, second = updates(folder)
    assert first["environment/turns"] > 2 and 0 < first["environment/token_share"] < 0.6
    for row in (first, second):
        assert row["mismatch/kl"] < 1e-9 and row["mismatch/max_ratio"] < 1.0001
        limits = sum(row[f"environment/{name}"] for name in ("out_of_turns", "cut", "no_room"))
        assert row["objective/eos_rate"] + limits == pytest.approx(1)
    samples = [json.loads(line) for line in folder.completions.read_text().splitlines()]
    for sample in samples:
        roles = [turn["role"] for turn in sample["messages"]]
        assert roles == (["assistant", "user"] * len(roles))[: len(roles)]
        assert sample["messages"][-1]["content"] == sample["response"]
        assert sample["score"] == sum(turn.get("reward", 0) for turn in sample["messages"])
    assert max(len(sample["messages"]) for sample in samples) > 3


@pytest.mark.parametrize(
    "words",
    [
        ("algo=grpo", "schedule.max_lag=1", "schedule.update=in_flight"),
        ("algo=rloo", "schedule.max_lag=2", "generator.replicas=2", "correction=truncate"),
        nightly(["algo=ppo", "schedule.replay=2", "schedule.minibatches=2", "model.lora.rank=4"]),
    ],
    ids=["in flight", "replicas", "replay and LoRA"],
)
def test_episodes_fit_every_schedule(tiny, tmp_path, words):
    folder = RunFolder(tmp_path)
    run(tiny(*EPISODES, "schedule.total_episodes=96", *words), folder)
    found = updates(folder)
    assert found[-1]["update"] >= 3 and all(row["environment/turns"] > 1 for row in found)
    assert found[0]["mismatch/kl"] < 1e-9 or "schedule.update=in_flight" in words


def test_a_run_ahead_of_the_trainer_resumes_after_kill_9_with_the_same_episodes(
    tiny, command, tmp_path, finished
):
    words, folder = [*command, *LAG], RunFolder(tmp_path / run_name(tiny(*LAG)))
    process = start(words, "-m", "rlhf.train")
    wait_for(lambda: folder.last_checkpoint() is not None, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert "resumed from update" in finish(words)
    assert_same_end(folder, finished(*LAG))
    assert any(row["lag"] for row in rows(folder) if "lag" in row)


def test_virtual_time_with_slots_for_all_trains_on_the_episodes_of_a_generator_process(
    tiny, tmp_path, finished
):
    plain, virtual = finished(*LAG), RunFolder(tmp_path)
    run(tiny(*LAG, "clock=virtual"), virtual)
    one, other = (load_file(each.model / "model.safetensors") for each in (plain, virtual))
    assert all(one[name].equal(other[name]) for name in one)
    for row, expected in zip(rows(virtual), rows(plain), strict=True):
        shared = row.keys() & expected.keys()
        assert {name: row[name] for name in shared} == {name: expected[name] for name in shared}
        assert {name.split("/")[0] for name in row.keys() ^ expected.keys()} <= {
            *("rollouts", "generator", "annotator"),
        }


class _Stop(Hook):
    def after_update(self, state, metrics):
        if state.update == 2:
            raise StopRun("enough")


@pytest.mark.parametrize(
    "words",
    [
        nightly(("algo=grpo", "schedule.update=in_flight", "schedule.refill=2")),
        (
            *("algo=ppo", "schedule.update=in_flight", "schedule.max_age=1", "schedule.stale=cut"),
            "schedule.replay=2",
        ),
        nightly(("algo=rloo", "schedule.max_age=1", "schedule.stale=drop", "schedule.unit=sequence")),
    ],
    ids=["refill", "cut", "drop"],
)
def test_episodes_fit_the_rules_of_virtual_time_and_resume(tiny, tmp_path, words):
    virtual = ("clock=virtual", "clock.slots=12", "clock.spread=1", "clock.prefill=0.1")
    words = (*EPISODES, "schedule.order=completed", "schedule.max_lag=1", *virtual, *words)
    words = (*words, "schedule.total_episodes=96", "schedule.save_every=1", "schedule.eval_every=0")
    first, second = RunFolder(tmp_path / "first"), RunFolder(tmp_path / "second")
    run(tiny(*words), first)
    found = updates(first)
    assert all(row["environment/turns"] > 1 and row["rollouts/oldest"] <= 1 for row in found)
    run(tiny(*words), second, hooks=[_Stop()])
    run(tiny(*words), second)
    assert_same_end(first, second)


def test_one_turn_trains_as_without_an_environment(tiny, tmp_path):
    def weights(name, *words):
        folder = RunFolder(tmp_path / name)
        run(tiny(*EPISODES, "algo=ppo", "scorer=answer", "eval.prompts=8", *words), folder)
        return load_file(folder.model / "model.safetensors"), updates(folder)

    one, figures = weights("one", "environment.max_turns=1")
    plain, expected = weights("plain", "environment=none")
    assert all(one[name].equal(plain[name]) for name in plain)
    for row, other in zip(figures, expected, strict=True):
        same = other.keys() - {"objective/eos_rate"}  # without an environment, a reply with an end has ended
        assert {name: row[name] for name in same} == {name: other[name] for name in same}


def test_an_evaluation_after_the_run_plays_the_episodes_of_the_last_one(finished, tmp_path):
    folder = RunFolder(shutil.copytree(finished(*SAVED).path, tmp_path / "copy"))
    (found,) = evaluate(changed(folder), folder, only=("model",))
    last = rows(folder)[-1]
    names = ("eval/score", "eval/response_tokens", "eval/eos_rate", "eval/kl")
    assert {name: found[name] for name in names} == pytest.approx({name: last[name] for name in names})


def test_saved_episodes_are_trained_on_again(tiny, tmp_path, finished):
    source, folder = finished(*SAVED), RunFolder(tmp_path)
    stored = (f"generator.path={source.generations}", "generator.temperature=0.7", "scorer=labels")
    run(tiny(*EPISODES, "algo=grpo", "generator=dataset", *stored), folder)
    names = ("objective/scores", "environment/turns", "environment/token_share", "policy/grad_norm")
    for row, expected in zip(updates(folder), updates(source), strict=True):
        assert {name: row[name] for name in names} == pytest.approx({name: expected[name] for name in names})


def test_prompts_describe_the_tools_and_texts_become_messages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = family("chatml")
    tokenizer.chat_template = TEMPLATE
    model = tiny_lm(
        "llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=1024
    )
    save(model, tokenizer, tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "What is {n} + 3?"}}\n' for n in range(9)))
    (tmp_path / "length.py").write_text("def score(response):\n    return float(len(response) % 7)\n")
    words = (
        *(
            *("task=local", "task.path=rows.jsonl", "model.policy=model", "algo=rloo"),
            "generator.response_length=12",
        ),
        *("environment=tools", "environment.functions=[tests.environments.test_tools:add]", "eval.prompts=1"),
        *("scorer=function", "scorer.path=length.py:score", "scorer@gold=none", "schedule.total_episodes=16"),
        *("schedule.prompts_per_update=4", "progress=off", "optim.lr=1e-3", "backend.micro_batch=4"),
        "generator.response_length=12",
    )
    run(compose([*words]), RunFolder(tmp_path / "run"))
    (sample, *_) = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").open()]
    assert '"name": "add"' in sample["prompt"] and "<|im_start|>user\nWhat is " in sample["prompt"]
    assert updates(RunFolder(tmp_path / "run"))[0]["environment/turns"] >= 1
    with pytest.raises(UserError, match="whose chat template describes tools"):
        run(compose([*words, "model.chat_template=plain"]), RunFolder(tmp_path / "plain"))
    others = [word for word in words if not word.startswith("scorer=") and "scorer.path" not in word]
    assert not problems(compose([*others, "scorer=environment"]))
