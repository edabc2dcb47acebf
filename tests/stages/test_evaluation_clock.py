"""An evaluation on another day reads the prompts of the run."""

import json
from types import SimpleNamespace

from rlhf.runs.folder import RunFolder
from rlhf.stages import evaluation
from rlhf.words.compose import compose
from tests.chat_templates import with_template


def test_chat_templates_read_the_time_of_the_start_of_the_evaluated_run(tmp_path, monkeypatch):
    (tmp_path / "environment.json").write_text(json.dumps({"started": "2001-02-03T04:05:06"}))
    with_template("clock").save_pretrained(tmp_path / "model")
    data = tmp_path / "data.jsonl"
    turns = [[{"role": "user", "content": f"Why {i}?"}] for i in range(9)]
    data.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    model = f"{tmp_path}/model"
    words = ["algo=rloo", "task=local", f"task.path={data}", f"model.policy={model}", f"model.reward={model}"]
    read = []
    monkeypatch.setattr(evaluation, "evaluations", lambda group, cfg, *others: read.append(cfg) or iter(()))
    monkeypatch.setattr(evaluation, "_refuse_other_tokenizers", lambda due, cfg: None)
    due = [SimpleNamespace(name="model", named=True, checkpoint=None, shards=False)]
    assert not list(evaluation.measure(due, compose(words), RunFolder(tmp_path), "validation", None))
    assert [cfg.model.clock for cfg in read] == ["2001-02-03T04:05:06"]
