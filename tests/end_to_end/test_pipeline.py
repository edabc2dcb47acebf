"""Tests of `python -m rlhf.pipeline`: the chain of stages from the SFT model to the final evaluation."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf import pipeline
from rlhf.assembly.parts import make
from rlhf.core.files import read_lines
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.words.compose import compose, load_config, run_name
from tests.end_to_end.conftest import TINY, assert_same_end
from tests.hub_server import TOKEN

README = (Path(__file__).parents[2] / "README.md").read_text()
(COMMAND,) = re.findall(r"^    python -m rlhf\.pipeline (.*)$", README, re.M)
WORDS = [*COMMAND.split(), *TINY, "schedule.total_episodes=64", "schedule.save_every=1"]
WORDS += ['stages.sft=["debug=tiny","schedule.save_every=1"]', "eval.samples=0"]

# Runs the pipeline command and kills it with SIGKILL at the place that the first argument names: in a stage,
# or between two stages.
KILLED = """
import os, signal, sys
from rlhf import pipeline
from rlhf.terminal import console
from rlhf.stages import evaluation, prerequisites
from rlhf.training.recorder import Recorder
place = sys.argv.pop(1)
def strike():
    os.kill(os.getpid(), signal.SIGKILL)
if place == "pairs":
    prerequisites.add_pairs = lambda *_: strike()
elif place == "evaluation":
    append = evaluation.append
    evaluation.append = lambda *given: (append(*given), strike())
else:
    stage, update = place.split(":")
    flush = Recorder.flush
    def struck(self, state, rollouts, engine):
        flush(self, state, rollouts, engine)
        if stage in console.title("") and state.update == int(update):
            strike()
    Recorder.flush = struck
pipeline.main()
"""
PLACES = {  # place of the kill: text that the next start prints
    "SFT model:2": "resumed from update 1 of 2",
    "pairs": "[1/5] SFT model: finished, in ",
    "reward model:2": "[2/5] preference pairs: finished, in ",
    "RLHF (dpo):3": "[3/5] reward model: finished, in ",
    "evaluation": "[4/5] RLHF (dpo): finished, in ",
}


def start(command, *words) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *command, *words], capture_output=True, text=True, timeout=500)


def test_chain_killed_in_every_stage_resumes_and_ends_like_an_uninterrupted_run(tmp_path):
    words = [*WORDS, f"cache_dir={tmp_path}/cache", f"output_dir={tmp_path}/out", "progress=plain"]
    expected = None
    for place, then in PLACES.items():
        done = start(["-c", KILLED, place], *words)
        assert done.returncode == -signal.SIGKILL, (place, done.stdout + done.stderr)
        assert expected is None or expected in done.stdout, place
        expected = then
    done = start(["-m", "rlhf.pipeline"], *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert expected in done.stdout
    assert "evaluated already with these settings" in done.stdout, "earlier evaluations must be reused"

    cfg = compose(words)
    folder = RunFolder(tmp_path / "out" / run_name(cfg))
    rows = read_lines(folder.evaluations)
    assert [row["model"] for row in rows] == ["checkpoint-2", "checkpoint-3", "model"]
    assert "eval/win_rate_low" in rows[-1] and rows[-1]["update"] == 4
    table = done.stdout[done.stdout.rindex("stage ") :]
    assert table.count("skipped") == 4 and "evaluation (validation)" in table

    # The same run without the pipeline, with stages that were not killed.
    alone = RunFolder(tmp_path / "alone")
    run(compose([*words, f"cache_dir={tmp_path}/other", "progress=off"]), alone)
    assert_same_end(folder, alone)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return the arguments of a chain whose base model, prompts and pairs are in local folders."""
    import torch

    from rlhf.models.loading import new_nano, save

    base = tmp_path_factory.mktemp("stored")
    cfg = compose([*TINY, "algo=sft"])
    source = make(cfg.task)
    tokenizer = source.tokenizer()
    torch.manual_seed(0)
    save(new_nano(cfg.model, tokenizer), tokenizer, base / "base")
    for folder in ("data", "pairs"):
        (base / folder).mkdir()
    for split in ("train", "validation"):
        rows = source.prompts(split).select(range(24))
        with (base / "data" / f"{split}.jsonl").open("w") as data:
            data.writelines(json.dumps(row) + "\n" for row in rows)
        texts = rows["reference_response"]
        with (base / "pairs" / f"{split}.jsonl").open("w") as pairs:
            for i, query in enumerate(rows["query"]):
                pair = {"prompt": query, "chosen": texts[i], "rejected": texts[i - 1]}
                pairs.write(json.dumps(pair) + "\n")
    (base / "judge.py").write_text(
        "def brief(prompt, response, reference):\n    return -float(len(response))\n"
    )
    return [
        "debug=tiny", "task=tldr", "model=pythia", f"model.base={base}/base", f"task.path={base}/data",
        f"task.preferences_path={base}/pairs", "task.max_prompt_tokens=192", "scorer@gold=function",
        f"gold.path={base}/judge.py:brief", f"output_dir={base}/out", "progress=off", "eval.samples=0",
    ]  # fmt: skip


def run_pipeline(monkeypatch, capsys, *words) -> str:
    monkeypatch.setattr(sys, "argv", ["pipeline", *words])
    pipeline.main()
    return capsys.readouterr().out


def test_each_stage_uses_the_models_and_pairs_of_the_earlier_stages(stored, monkeypatch, capsys):
    said = run_pipeline(monkeypatch, capsys, *stored)
    out = Path(stored[9].partition("=")[2])
    folders = {path.name.split("-")[2]: RunFolder(path) for path in out.glob("tldr-base*")}
    (pairs,) = out.glob("tldr-pairs-*")
    assert sorted(folders) == ["dpo", "reward", "sft"] and all(f.finished() for f in folders.values())
    cfg = load_config(folders["dpo"].config)
    assert cfg.model.policy == str(folders["sft"].model) and cfg.model.reward == str(folders["reward"].model)
    reward = load_config(folders["reward"].config)
    assert reward.task.preferences_path == str(pairs) and reward.model.policy == cfg.model.policy
    assert [row["model"] for row in read_lines(folders["dpo"].evaluations)] == ["checkpoint-1", "model"]
    assert "[5/5] evaluation (validation): done in" in said

    again = run_pipeline(monkeypatch, capsys, *stored)
    assert again.count("finished, in ") == 5 and again.count("skipped") == 5


def test_no_sft_or_reward_stage_if_policy_and_scorer_are_configured(stored, monkeypatch, capsys, tmp_path):
    out = Path(stored[9].partition("=")[2])
    (sft,) = out.glob("tldr-base-sft-*")
    words = [*stored, f"output_dir={tmp_path}", f"model.policy={sft}/model", "scorer=function"]
    words = [word for word in words if word != stored[9]]
    said = run_pipeline(monkeypatch, capsys, *words, f"scorer.path={out.parent}/judge.py:brief")
    assert "[1/2] RLHF (dpo)" in said and len(list(tmp_path.glob("tldr-base*"))) == 1


def test_final_model_is_pushed_only_with_push_to_and_as_private_repository(stored, monkeypatch, capsys, hub):
    run_pipeline(monkeypatch, capsys, *stored)
    assert hub.created == []
    said = run_pipeline(monkeypatch, capsys, *stored, "push_to=me/model")
    assert hub.created[0]["visibility"] == "private"
    assert {"README.md", "config.json", "model.safetensors"} <= hub.files["me/model"].keys()
    assert f"pushed to {hub.url}/me/model" in said.replace("\n", "") and TOKEN not in said
