"""The base of loggers that continue a run in a store, with a store that can refuse rows."""

import pytest

from rlhf.core.files import append
from rlhf.core.metrics import Evaluation
from rlhf.core.state import TrainState
from rlhf.loggers.dashboards import ContinuedDashboard
from rlhf.runs.folder import RunFolder


class Store(ContinuedDashboard):
    """A logger that keeps what it sends in a list, and raises OSError while `down`."""

    def __init__(self, folder, last=()):
        super().__init__("store", folder, dict(last), (OSError,))
        self.sent = []
        self.down = False

    def store(self, row, samples, update):
        if self.down:
            raise OSError("no route to http://me:hunter2@host")
        self.sent.append((update, samples or row))


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    """Return a run folder with rows of three updates and one evaluation."""
    made = RunFolder(tmp_path)
    append(
        made.metrics, [{"update": 1, "lr": 0.1}, {"update": 1, "eval/score": 5.0}, {"update": 2, "lr": 0.2}]
    )
    append(made.completions, [{"update": 1, "prompt": "p", "response": "r"}])
    return made


def test_rows_of_a_run_without_a_store_are_sent_once(folder):
    store = Store(folder)
    store.send_missing()
    store.send_missing()
    samples = [{"prompt": "p", "response": "r"}]
    assert store.sent == [
        (1, {"update": 1, "lr": 0.1}),
        (1, {"eval/score": 5.0}),
        (2, {"update": 2, "lr": 0.2}),
        (1, samples),
    ]


def test_values_that_the_store_has_are_not_sent_again(folder):
    store = Store(folder, {"update": 2, "lr": 1, "completions": 1})
    store.send_missing()
    assert store.sent == [(1, {"eval/score": 5.0}), (2, {"lr": 0.2})]


def test_refused_rows_are_sent_at_the_next_checkpoint_after_one_warning(folder, tmp_path, capsys):
    store, state = Store(folder), TrainState(num_updates=5)
    store.send_missing()
    store.sent.clear()
    store.down = True
    for state.update in (3, 4):
        row = {"update": state.update, "lr": 0.3}
        append(folder.metrics, [row])
        store.log(row, state)
    evaluation = Evaluation({"eval/score": 6.0}, [{"prompt": "q", "response": "s"}])
    append(folder.metrics, [{"update": 4, "eval/score": 6.0}])
    append(folder.completions, [{"update": 4, **evaluation.samples[0]}])
    store.evaluation({"update": 4, "eval/score": 6.0}, evaluation, state)
    store.save(tmp_path)
    assert not store.sent
    out = "".join(capsys.readouterr())
    assert out.count("logger=store did not accept the metrics of update 3") == 2, "one each time"
    assert "hunter2" not in out

    store.down = False
    store.save(tmp_path)
    store.save(tmp_path)
    assert [update for update, _ in store.sent] == [3, 4, 4, 4]
    assert store.sent[-1] == (4, evaluation.samples)
