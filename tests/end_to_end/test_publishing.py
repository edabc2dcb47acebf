"""Tests of model cards of runs, and of uploads by the real client of the hub to a server on this machine."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from rlhf import train
from rlhf.core.errors import RunError
from rlhf.experiment import Experiment
from rlhf.models.folder import CARD
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.words.compose import compose, digest, load_config
from tests.hub_server import TOKEN


def card_of(folder: RunFolder) -> ModelCard:
    return ModelCard.load(folder.model / CARD)


def command_of(card: ModelCard) -> list[str]:
    """Return the overrides of the command in a card."""
    (text,) = re.findall(r"```bash\n(python -m rlhf\.train .*?)```", card.text, re.S)
    return shlex.split(text.replace("\\\n", " "))[3:]


def test_the_card_of_a_run_has_its_results_with_intervals_and_a_command_for_the_same_run(finished):
    folder = finished("algo=rloo")
    card = card_of(folder)
    cfg, result = load_config(folder.config), (folder.finished() or {})["result"]
    named = {each.metric_type: each.metric_value for each in card.data.eval_results}
    assert named["win_rate"] == result["eval/win_rate"] and named["kl"] == result["eval/kl"]
    assert (card.data.license, card.data.base_model, card.data.datasets) == ("unknown", None, None)
    assert card.data.tags == ["rlhf", "rloo"] and card.data.pipeline_tag == "text-generation"
    assert re.search(
        r"\| win rate vs\. references \(facts\) \| [\d.]+ \[[\d.]+, [\d.]+\] \| [\d.]+ \[[\d.]+, [\d.]+\] \|",
        card.text,
    )
    assert "| seed | 1 |" in card.text and "| torch | " in card.text and "RLOO: " in card.text
    assert digest(compose(command_of(card))) == digest(cfg)


@pytest.mark.parametrize(
    ("words", "tags", "task", "metric"),
    [
        (("algo=sft",), ["rlhf", "sft"], "text-generation", "loss"),
        (("algo=reward",), ["rlhf", "reward", "reward-model"], "text-classification", "accuracy"),
    ],
)
def test_cards_of_sft_and_reward_models_have_their_own_metrics(finished, words, tags, task, metric):
    card = card_of(finished(*words))
    assert (card.data.tags, card.data.pipeline_tag) == (tags, task)
    assert metric in {each.metric_type for each in card.data.eval_results}


def test_no_card_contains_a_path_of_this_machine(tiny, tmp_path, finished):
    start = finished("algo=sft").model
    folder = RunFolder(tmp_path / "run")
    run(tiny("algo=rloo", f"model.policy={start}", "schedule.eval_every=0", "scorer=facts"), folder)
    card = card_of(folder)
    for text in (str(tmp_path), str(start.parent.parent), str(Path.home())):
        assert text not in card.content
    assert f"| base model | {start.parent.name}/model |" in card.text
    assert "was not evaluated" in card.text and card.data.eval_results is None


def test_a_finished_run_is_uploaded_as_a_private_repository_with_a_valid_card(
    tmp_path, hub, monkeypatch, capsys, command
):
    monkeypatch.chdir(tmp_path)
    experiment = Experiment(*command, "algo=rloo", "scorer=facts", "push_to=me/it")
    experiment.run()
    folder = experiment.files
    (created,) = hub.created
    assert (created["organization"], created["name"], created["visibility"]) == ("me", "it", "private")
    assert hub.files["me/it"] == {path.name: path.read_bytes() for path in folder.model.iterdir()}
    assert hub.checked and f"pushed to {hub.url}/me/it" in capsys.readouterr().out
    assert TOKEN not in (folder.config.read_text() + folder.log.read_text())
    card_of(folder).validate()
    with pytest.raises(ValueError, match="license is missing"):
        ModelCard("---\ntags: [a]\n---\n").validate()


def test_after_a_failed_upload_the_same_command_uploads_the_finished_run(
    tiny, tmp_path, hub, monkeypatch, capsys, command
):
    words = [*command, "algo=rloo", "scorer=facts", "push_to=me/it"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    hub.refused = True
    code = ended()
    said = capsys.readouterr()
    assert code == 1 and "push_to=me/it must be a reachable repository" in said.err
    assert "is complete, and the same command pushes it again" in said.err and TOKEN not in said.err
    experiment = Experiment(*words)
    assert experiment.status == "finished" and hub.commits == 0
    assert ended() == 1
    hub.refused = False
    assert ended() == 0
    said = capsys.readouterr()
    assert "finished already" in said.out and f"pushed to {hub.url}/me/it" in said.out
    assert hub.commits == 1 and "model.safetensors" in hub.files["me/it"]
    assert ended() == 0 and hub.commits == 1, "files that the repository has are not uploaded again"
    assert digest(compose(command_of(card_of(experiment.files)))) == digest(experiment.config)
    hub.files["me/it"].pop(CARD)
    assert experiment.run() == experiment.result and hub.commits == 2
    hub.refused = True
    hub.files["me/it"].clear()
    with pytest.raises(RunError, match="the same command pushes it again"):
        experiment.run()


def ended() -> int:
    """Run the command line, and return its exit code."""
    try:
        train.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0
