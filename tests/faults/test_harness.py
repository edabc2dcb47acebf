"""Tests of the fault harness: it repeats its faults, observes every phase, and notices wrong outcomes."""

import subprocess
import sys
from dataclasses import replace
from itertools import islice

import pytest
import requests

from tests.faults import processes
from tests.faults.__main__ import drawn, missing, selected
from tests.faults.catalogue import BY_NAME, ENTRIES
from tests.faults.catalogue.services import status
from tests.faults.catalogue.signals import KILL, to
from tests.faults.entry import PHASES, Entry, Moment, Outcome, codes
from tests.faults.runs import RUNS
from tests.faults.service import Service, score
from tests.faults.trial import ROOT, SECRET, Trial
from tests.faults.workspace import nothing

FINE = Outcome(codes(0))


def names(seed, count):
    return [(number, entry.name) for number, entry in islice(drawn(ENTRIES, seed), count)]


# -- the draw --------------------------------------------------------------------------------------


def test_the_catalogue_has_at_least_120_entries_and_every_run_has_one():
    assert len(BY_NAME) == len(ENTRIES) >= 120
    assert RUNS.keys() - {entry.run for entry in ENTRIES} == {"short"}, "`extend` continues the short run"


def test_a_seed_gives_the_same_trials_and_another_seed_others():
    assert names("7", 500) == names("7", 500)
    assert names("7", 20) != names("8", 20)


def test_every_possible_entry_is_drawn_once_before_one_is_repeated():
    possible = {entry.name for entry in ENTRIES if missing(entry) is None}
    assert {name for _, name in names("3", len(possible))} == possible


def test_a_trial_repeats_its_random_numbers(tmp_path):
    entry = BY_NAME["kill.trainer.update"]

    def numbers(number):
        trial = Trial(entry, number, tmp_path, None)
        return entry.at.draw(trial.draw), trial.draw.random()

    assert numbers("7:3") == numbers("7:3") != numbers("7:4")


def test_a_whole_name_selects_one_entry_and_a_part_of_a_name_several():
    assert [e.name for e in ENTRIES if selected(e, ["kill.trainer.row"])] == ["kill.trainer.row"]
    assert len([e for e in ENTRIES if selected(e, ["kill.trainer"])]) > 5


# -- the scoring service ---------------------------------------------------------------------------


def test_the_service_fails_a_number_of_times_and_recovers():
    question = {"prompts": ["a"], "responses": ["b"], "references": ["c"]}
    with Service() as service:
        service.fail(status(503), times=2)
        answers = [requests.post(service.address, json=question, timeout=10) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [503, 503, 200]
        assert answers[2].json() == {"scores": [score("b")]}
        service.close()
        with pytest.raises(requests.ConnectionError):
            requests.post(service.address, json=question, timeout=10)
        service.open()
        assert requests.post(service.address, json=question, timeout=10).status_code == 200


# -- trials ----------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.nightly
class TestTrials:
    """The command of a finished run, which ends quickly, with a fault of the test."""

    def problems(self, workspace, tmp_path, act, outcome=FINE, **settings) -> list[str]:
        entry = Entry("test", "Tests: a test", "hf", act, outcome, **{"begin": "finished", **settings})
        return Trial(entry, "1:0", tmp_path / "trial", workspace).carry_out().problems

    def test_a_run_without_a_fault_passes_and_its_folder_is_removed(self, workspace, tmp_path):
        assert self.problems(workspace, tmp_path, nothing) == []
        assert not (tmp_path / "trial").exists()

    def test_different_weights_and_rows_are_noticed(self, workspace, tmp_path):
        def change(trial):
            weights = trial.run_folder() / "model" / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1] + b"!")
            metrics = trial.run_folder() / "metrics.jsonl"
            metrics.write_text(metrics.read_text().replace('"update": 2', '"update": 3'))

        problems = self.problems(workspace, tmp_path, nothing, repair=change)
        assert any("model.safetensors differs" in problem for problem in problems)
        assert any("metrics.jsonl: row 3" in problem for problem in problems)
        assert (tmp_path / "trial").exists(), "a failed trial keeps its folder"

    def test_a_wrong_exit_code_and_a_missing_message_are_noticed(self, workspace, tmp_path):
        (problem,) = self.problems(workspace, tmp_path, nothing, Outcome(codes(75)))
        assert problem.startswith("exit code 0 instead of 75: ")
        (problem,) = self.problems(workspace, tmp_path, nothing, Outcome(codes(_0="no such text")))
        assert problem == "exit code 0 without 'no such text' in the output"

    def test_a_process_temporary_files_and_a_secret_are_noticed(self, workspace, tmp_path):
        def leave(trial):
            subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(60)"],
                cwd=trial.out,
                stdout=subprocess.DEVNULL,
            )
            (trial.temporary / "left").touch()
            (trial.out / "note").write_text(SECRET)

        problems = self.problems(workspace, tmp_path, leave, Outcome(codes(0), grace_s=0.2))
        assert [problem.partition(":")[0] for problem in problems] == [
            *("processes left after 0.2 s", "temporary files left", "out/note contains a secret"),
        ]
        assert processes.of(tmp_path / "trial") == []

    def test_shared_memory_that_no_process_uses_is_noticed(self, workspace, tmp_path):
        file = processes.SHARED_MEMORY / f"faults-{tmp_path.name}"
        try:
            (problem,) = self.problems(workspace, tmp_path, lambda trial: file.touch())
            assert problem == f"shared memory left: {file.name}"
        finally:
            file.unlink()

    def test_a_traceback_is_noticed(self, workspace, tmp_path):
        entry = Entry("test", "Tests: a test", "hf", nothing, Outcome(codes(0), same=False))
        trial = Trial(entry, "1:0", tmp_path, workspace)
        output = tmp_path / "output"
        output.write_text('Traceback (most recent call last):\n  File "x", line 1\nValueError: why\n')
        trial.check(type("Session", (), {"text": output.read_text(), "output": output})(), 0, codes(0))
        assert trial.problems == ["traceback in output: ValueError: why"]

    def test_every_phase_of_a_run_is_observed(self, workspace):
        folder = workspace.finished("lag")
        seen = {text.split()[0] for text in (folder / "phases-1").read_text().splitlines()}
        assert seen >= set(PHASES)

    def test_a_killed_run_is_run_again_and_has_the_results_of_an_uninterrupted_run(self, workspace, tmp_path):
        entry = replace(BY_NAME["kill.trainer.update"], at=Moment("train", (3,), spread_s=0))
        trial = Trial(entry, "1:0", tmp_path / "trial", workspace)
        report = trial.carry_out()
        assert report.problems == [] and report.codes == [-KILL, 0] and not report.missed
        assert report.notes[0] == "train 3 + 0 ms" and "the same command again" in report.notes

    def test_worker_processes_are_found_by_their_role(self, workspace, tmp_path):
        found = []

        def look(trial):
            found.extend(process.role for process in processes.of(trial.folder))
            to("generator", KILL)(trial)

        entry = replace(BY_NAME["kill.generator.lag"], act=look, at=Moment("train", (2,)))
        report = Trial(entry, "1:0", tmp_path / "trial", workspace).carry_out()
        assert report.problems == [] and {"command", "generator", "annotator"} <= set(found)
        assert any(note.startswith("SIGKILL to generator") for note in report.notes)


CLOCK = "import time; before = time.time(); open('jumped', 'w').close(); print(round(time.time() - before))"


@pytest.mark.process
@pytest.mark.parametrize("forked", [pytest.param(True, marks=pytest.mark.forks), False])
def test_the_clock_of_a_command_jumps(forked, tmp_path):
    environment = {
        "PYTHONPATH": f"{ROOT}/tests/faults/inside",
        "RLHF_FAULTS": f'{{"clock": ["{tmp_path}/jumped", -3600]}}',
    }
    command = [sys.executable, "-c", CLOCK]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("-3600\n", "")
