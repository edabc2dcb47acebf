"""The terminal display of a run: figures of updates, evaluations, and completions."""

import pytest

from rlhf.assembly.parts import shown_figures
from rlhf.config.run import Progress
from rlhf.core.metrics import Evaluation
from rlhf.core.state import TrainState
from rlhf.loggers import logger as module
from rlhf.loggers.logger import EVALUATION_METRICS, Display, metric_texts, sample_lines
from rlhf.training.evaluators import last_messages
from tests.checks.test_check import compose

FIGURES = {"objective/scores": "reward", "objective/kl": "KL", "lag": "lag"}
SAMPLE = {
    "prompt": "SUBREDDIT: r/work\nTITLE: Budget cut by my boss\n"
    "POST: My boss cut the budget of my project last monday.\n"
    "TL;DR:",
    "response": "boss cut the budget " * 10,
    "reference": "boss cut budget",
    "score": 1.4567,
    "gold_score": 5.19,
    "reference_gold_score": 5.44,
}


@pytest.fixture
def lines(monkeypatch):
    """Return the list of lines that the display prints, without progress lines."""
    printed = []
    monkeypatch.setattr(module.console, "print", lambda text, **_: printed.append(text))
    monkeypatch.setattr(module, "say", lambda text, style=None: printed.append(text))
    monkeypatch.setattr(module, "say_items", lambda title, items: printed.append("  ".join([title, *items])))
    return printed


def display_of(state, samples=3, mode=Progress.plain):
    shown = Display("[2/2] dpo tldr_mini", state, mode, samples, FIGURES)
    shown.progress.update = lambda done, items=(): setattr(shown, "items", items)
    return shown


def evaluation(**figures):
    return Evaluation({f"eval/{k}": v for k, v in figures.items()}, [SAMPLE] * 5)


def test_figures_of_an_update_come_first_then_the_last_evaluation_and_the_counters(lines):
    state = TrainState(num_updates=40, update=16, episode=2048)
    shown = display_of(state, samples=0)
    row = {
        "objective/scores": 1.46,
        "objective/kl": -4e-7,
        "lag": 2,
        "throughput/episodes_per_s": 283.5,
        "x": 1,
    }
    shown.log(row, state)
    assert shown.items == ["reward 1.460", "KL 0.000", "lag 2", "2,048 episodes", "283.5 episodes/s"]
    shown.evaluation({}, evaluation(win_rate=0.82, kl=1.0), state)
    shown.log({"objective/scores": 1.5}, state)
    assert shown.items == ["reward 1.500", "win rate 0.820 at update 16", "2,048 episodes"]


def test_an_evaluation_in_the_middle_is_a_line_with_intervals(lines):
    state = TrainState(num_updates=40, update=16)
    display_of(state).evaluation(
        {},
        evaluation(win_rate=0.82, win_rate_low=0.768, win_rate_high=0.862, gold_score=5.0, eos_rate=1),
        state,
    )
    assert (
        lines[0] == "[2/2] dpo tldr_mini  evaluated at update 16:  win rate 0.820 [0.768, 0.862]  judge 5.000"
    )
    assert len(lines) == 1


ANSWERS = {
    "win_rate": 0.0,
    "norm_reward": -0.4,
    "win_rate_vs_initial": 0.6,
    "accuracy": 0.6,
    "gold_score": 0.6,
}


def test_an_accuracy_of_answers_takes_the_place_of_all_win_rates(lines):
    state = TrainState(num_updates=40, update=16)
    shown = display_of(state, samples=0)
    shown.evaluation({}, evaluation(**ANSWERS, score=0.5), state)
    assert lines == [
        "[2/2] dpo tldr_mini  evaluated at update 16:  held-out accuracy 0.600  reward 0.500  judge 0.600"
    ]
    assert shown.evaluated == ["held-out accuracy 0.600 at update 16"]
    assert metric_texts(
        {"eval/accuracy": 0.6, "eval/margin": 0.1, "eval/gold_score": 0.6, "eval/win_rate": 0.0}
    ) == [
        "held-out accuracy 0.600",
        "judge 0.600",
    ], "offline training on pairs, whose judge checks answers"
    pairs = {"eval/accuracy": 0.5, "eval/margin": 0.1, "eval/gold_score": 2.0, "eval/win_rate": 0.0}
    assert metric_texts(pairs) == ["win rate 0.000", "held-out accuracy 0.500", "judge 2.000"]


def test_the_time_left_does_not_count_the_evaluation_before_the_first_update(lines, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    state = TrainState(num_updates=40)
    shown = Display("dpo", state, Progress.off, 0, FIGURES)
    now[0] = 60.0
    shown.evaluation({}, evaluation(kl=0.0), state)
    now[0], state.update = 61.0, 1
    shown.log({}, state)
    now[0] = 65.0
    shown.evaluation({}, evaluation(kl=0.0), state)
    assert shown.progress.left_s == 39.0


def test_an_update_counts_although_its_row_is_not_due(lines):
    state = TrainState(num_updates=40)
    shown = Display("dpo", state, Progress.off, 0, FIGURES)
    state.update = 1
    shown.updated({}, state)
    assert shown.progress.count == "update 1/40"


def test_the_first_evaluation_shows_one_completion_and_the_last_one_as_many_as_configured(lines):
    for state, count in ((TrainState(num_updates=40), 1), (TrainState(num_updates=40, update=40), 3)):
        lines.clear()
        display_of(state, samples=3).evaluation({}, evaluation(kl=1.0), state)
        assert sum(line.startswith("  prompt ") for line in lines) == count


def test_the_last_message_of_a_dialogue_is_shown_in_place_of_the_rendered_dialogue(lines):
    dialogues = [[{"role": "user", "content": "Hi"}, {"role": "user", "content": "Bye"}]] * 5
    found = evaluation(kl=1.0)
    found.messages = last_messages(dialogues)
    display_of(TrainState(num_updates=40)).evaluation({}, found, TrainState(num_updates=40))
    assert "  prompt    Bye" in lines and last_messages(None) is None
    assert last_messages([[{"role": "assistant", "content": None}]]) == [""]


def test_accuracies_of_training_and_of_held_out_pairs_have_two_names():
    cfg = compose(["algo=reward", "model.policy=m", "task=tldr"])
    names = {shown_figures(cfg)["rewards/accuracies"], EVALUATION_METRICS["eval/accuracy"]}
    assert names == {"train accuracy", "held-out accuracy"}


def test_progress_off_prints_no_evaluation_but_warnings(lines):
    state = TrainState(num_updates=40)
    shown = display_of(state, mode=Progress.off)
    shown.evaluation({}, evaluation(kl=1.0), state)
    shown.warn("look")
    assert lines == ["warning: look"]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_completion_has_four_lines_that_fit_the_width(width):
    found = sample_lines(SAMPLE, width)
    assert len(found) == 4 and max(map(len, found)) <= width
    assert found[0].endswith("last monday. TL;DR:") and "... " in found[0]
    assert found[1].startswith("  response  boss cut the budget boss") and found[1].endswith(" ...")
    assert found[2] == "  reference boss cut budget"
    assert found[3].startswith("  scores    reward 1.457  judge 5.190")
    bare = sample_lines({"prompt": "a", "response": " \n", "reference": ""}, width)
    assert bare == ["  prompt    a", "  response  (empty)"]
