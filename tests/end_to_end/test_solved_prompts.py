"""Runs that leave out solved prompts (`schedule.solved_at`): which prompts they draw, also after a resume."""

from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.tasks.task import PromptOrder
from tests.end_to_end.conftest import assert_same_end, interrupted, rows

RUN = [  # the second epoch begins with update 2; a request of 8 prompts is in flight
    "task.train_size=16",
    "schedule.total_episodes=96",
    "schedule.max_lag=1",
    "schedule.solved_at=0.5",
    "scorer=function",
    "scorer.path=tests.end_to_end.test_solved_prompts:score",
    "scorer.missing_eos_score=null",
    "generator.worker=false",
    "schedule.save_every=1",
    "schedule.eval_every=0",
    "algo=grpo",
    "algo.samples_per_prompt=2",
]


def score(prompt: str, response: str, reference: str) -> float:
    """Return 1 for half of the prompts."""
    return float(len(prompt) % 2)


def test_solved_prompts_are_not_drawn_again_and_a_resumed_run_draws_the_same(tiny, tmp_path, monkeypatch):
    texts, drawn, folders = [], [], []
    draw = PromptOrder.__next__

    def recorded(self):
        prompts = draw(self)
        if self.solved_at is not None:  # not a prerequisite stage
            texts.append(prompts.texts)
            drawn.append([score(text, "", "") == 1 for text in prompts.texts])
        return prompts

    monkeypatch.setattr(PromptOrder, "__next__", recorded)
    for name in ("whole", "parts"):
        folders.append(RunFolder(tmp_path / name))
        if name == "parts":
            with interrupted(update=4):
                run(tiny(*RUN), folders[-1])
        run(tiny(*RUN), folders[-1])
    assert_same_end(*reversed(folders))
    first_epoch = drawn[0] + drawn[1]
    assert 0 < sum(first_epoch) < 16, "the task has both kinds of prompts"
    # the third batch is requested when the scores of the first are known, the second request is in flight
    solved = {text for text, odd in zip(texts[0], drawn[0], strict=True) if odd}
    assert not solved & set(texts[2]) and any(drawn[2] + drawn[3]), "the prompts of batch 1 come once more"
    assert not any(drawn[5])
    share = [row["prompts/solved"] for row in rows(folders[0]) if "prompts/solved" in row]
    assert share[1:] == [sum(first_epoch) / 16] * 5 and share[0] == sum(drawn[0]) / 16
