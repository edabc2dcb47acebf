"""Nested phases: their text, their end, and the function between units of work."""

import pytest

from rlhf.terminal.progress import Phases


@pytest.fixture
def seconds(monkeypatch):
    """Return a list with one number, the time in seconds that phases see."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_the_text_has_the_finished_units_of_every_phase():
    phases = Phases()
    assert phases.text() == ""
    with phases("evaluating"), phases("sampling", 1024) as sampled:
        sampled(256)
        with phases("token", 53) as token:
            token()
            token()
            assert phases.text() == "evaluating, sampling 256/1,024, token 2/53"
        assert phases.text() == "evaluating, sampling 256/1,024"
    assert phases.text() == ""


def test_an_inner_phase_of_one_unit_is_left_out():
    phases = Phases()
    with phases("training", 4), phases("micro-batch", 1):
        assert phases.text() == "training 0/4"
    with phases("training", 1), phases("micro-batch", 8):
        assert phases.text() == "training, micro-batch 0/8"


def test_a_phase_without_units_shows_its_seconds(seconds):
    phases = Phases()
    with phases("scoring"):
        assert phases.text() == "scoring"
        seconds[0] = 75.0
        assert phases.text() == "scoring 1:15"


def test_more_units_than_expected_are_not_shown():
    phases = Phases()
    with phases("log-probs", 4) as done:
        done(6)
        assert phases.text() == "log-probs 4/4"


def test_a_phase_ends_with_an_exception_that_is_raised_between_units_of_an_inner_phase():
    phases, calls = Phases(), []

    def stop():
        calls.append(phases.text())
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), phases("evaluating", between=stop), phases("token", 9) as token:
        for _ in range(9):
            token()
    assert calls == ["evaluating, token 1/9", "evaluating, token 2/9"] and phases.text() == ""
