"""Tests of runs whose rewards and win rates a language model gives: faults, resuming, a server of vLLM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import requests

from rlhf import relabel
from rlhf.core.errors import UserError
from rlhf.runs.folder import RunFolder
from rlhf.scorers.judge import Spent, answers_in
from rlhf.stages.evaluation import changed, evaluate
from rlhf.stages.run import run
from rlhf.words.compose import run_name
from tests import needs
from tests.end_to_end.conftest import TINY, VARIES, wait_for
from tests.fake_judge import FakeJudge, served

RUN = ["schedule.total_episodes=96", "schedule.save_every=2", "schedule.eval_every=3", "algo.ties=keep"]
UNEQUAL = (*VARIES, "judge/c", "judge/t", "judge/p", "eval/judge/c", "eval/judge/t", "eval/judge/p")


def words_for(judge: FakeJudge, *more: str) -> list[str]:
    scorer = "scorer=judge", f"scorer.url={judge.url}", f"scorer.model={judge.model}"
    gold = "scorer@gold=judge", f"gold.url={judge.url}", f"gold.model={judge.model}"
    return [*RUN, *scorer, *gold, *more]


def results(folder: RunFolder) -> tuple[list[dict], bytes]:
    """Return the rows without counts of calls and tokens and without times, and the weights."""
    lines = map(json.loads, folder.metrics.read_text().splitlines())
    rows = [{name: row[name] for name in row if not name.startswith(UNEQUAL)} for row in lines]
    return rows, (folder.model / "model.safetensors").read_bytes()


def test_a_killed_run_resumes_with_the_answers_that_it_had_and_asks_none_again(command, tiny, tmp_path):
    with served(FakeJudge(noise=1.0, drift=True)) as judge:
        words = words_for(judge, "eval.prompts=8")
        folder = RunFolder(tmp_path / run_name(tiny(*words)))
        process = subprocess.Popen([sys.executable, "-m", "rlhf.train", *command, *words])
        wait_for(lambda: (folder.path / "checkpoint-4" / "COMPLETE").exists(), process)
        asked = len(judge.asked)
        wait_for(lambda: len(judge.asked) > asked + 5, process)
        process.kill()
        process.wait()
        time.sleep(0.5)  # answers on their way are lost with the process
        asked, kept = len(judge.asked), len(answers(folder))
        with (folder.path / "judgements" / "scorer.jsonl").open("a") as file:
            file.write('{"key": "cut o')
        run(tiny(*words), folder)
        assert len(answers(folder)) - kept == len(judge.asked) - asked > 0, "a known answer was asked for"
        again = RunFolder(tmp_path / "again")
        (again.path / "judgements").mkdir(parents=True)
        for file in (folder.path / "judgements").iterdir():
            (again.path / "judgements" / file.name).write_bytes(file.read_bytes())
        asked = len(judge.asked)
        run(tiny(*words), again)
        assert len(judge.asked) == asked
    assert results(again) == results(folder)
    last = json.loads(folder.metrics.read_text().splitlines()[-1])
    assert {
        "eval/win_rate",
        "eval/win_rate_vs_initial",
        "eval/judge/first",
        "eval/win_rate_lc",
    } <= last.keys()
    assert not {"eval/score", "eval/gold_score", "eval/norm_reward"} & last.keys()


def answers(folder: RunFolder) -> list[dict]:
    """Return the answers in all files of judgements."""
    return [row for file in sorted((folder.path / "judgements").glob("*.jsonl")) for row in answers_in(file)]


@pytest.mark.parametrize("max_lag", [0, 1])
def test_sigterm_ends_the_wait_for_a_judge_that_hangs_within_a_second(command, tiny, tmp_path, max_lag):
    with served(FakeJudge()) as judge:
        words = words_for(judge, f"schedule.max_lag={max_lag}", "scorer@gold=facts")
        words = [word for word in words if not word.startswith(("gold.", "scorer@gold=judge"))]
        folder = RunFolder(tmp_path / run_name(tiny(*words)))
        hung: list[float] = []

        def hang(request):
            if (folder.path / "checkpoint-2" / "COMPLETE").exists():
                hung.append(time.monotonic())
                time.sleep(20)

        judge.respond = hang
        process = subprocess.Popen([sys.executable, "-m", "rlhf.train", *command, *words])
        wait_for(lambda: hung, process)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(30) == os.EX_TEMPFAIL and time.monotonic() - began < 15
        judge.respond = lambda request: None
        run(tiny(*words), folder)
        assert folder.finished()


def test_a_spent_budget_leaves_a_checkpoint_and_a_larger_one_continues(tiny, tmp_path):
    with served(FakeJudge()) as judge:
        priced = "scorer.prices=[10000,0]", "gold.prices=[10000,0]"  # each answer costs 1
        words = words_for(judge, *priced, "schedule.save_every=0")
        folder = RunFolder(tmp_path / run_name(tiny(*words)))
        with pytest.raises(Spent, match=r"scorer\.budget=40 is spent"):
            run(tiny(*words, "scorer.budget=40"), folder)
        assert folder.last_checkpoint() is not None
        run(tiny(*words, "scorer.budget=4000"), folder)
        rows = answers(folder)
        assert len(rows) == len(judge.asked)
    assert f"{sum(row['read'] for row in rows) / 100:.0f}" in folder.log.read_text()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"key": "secret"}, r"scorer\.token_variable"),
        (
            {"model": "other"},
            r"scorer\.model must be a model at .*\(it has: other\).*set scorer\.model=other",
        ),
        ({"respond": lambda request: (400, {"error": "no response_format"})}, r"scorer\.answer=text"),
        ({"respond": lambda request: (200, b"<html>")}, "OpenAI-compatible"),
        ({"garbage": 1.0}, r"scorer: 1 of 1 answers .*I would rather"),
    ],
    ids=["key", "model", "400", "html", "garbage"],
)
def test_a_fault_of_the_judge_ends_the_command_before_a_model_is_made(tiny, tmp_path, fault, said):
    from rlhf.checks.check import check_job

    with served(FakeJudge(**fault)) as judge, pytest.raises(UserError, match=said):
        cfg = tiny(*words_for(judge), "scorer.model=judge", "gold.model=judge", f"cache_dir={tmp_path}")
        check_job(cfg)
        run(cfg, RunFolder(tmp_path / "run"))
    assert not [*tmp_path.rglob("model")]


def test_a_judge_of_positions_changes_no_weight_and_a_hint_names_it(tiny, tmp_path, finished):
    with served(FakeJudge(position=1.0)) as judge:
        words = [*words_for(judge), "algo.ties=drop", "scorer.missing_eos_score=null"]
        words = [*words, "schedule.total_episodes=160"]
        folder = RunFolder(tmp_path / "run")
        run(tiny(*words), folder)
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    trained = [row for row in rows if "judge/first" in row]
    assert {(row["judge/first"], row["judge/consistent"], row["objective/tie_rate"]) for row in trained} == {
        (1.0, 0.0, 1.0)
    }
    assert folder.log.read_text().count("prefers a position") == 1


def test_a_finished_run_is_judged_again_and_a_second_time_without_a_question(finished, tmp_path):
    shutil.copytree(finished("schedule.total_episodes=32").path, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    with served(FakeJudge()) as judge:
        words = ["scorer@gold=judge", f"gold.url={judge.url}", "gold.model=judge"]
        (row,) = evaluate(changed(folder, words), folder, only=["model"])
        assert {"eval/win_rate", "eval/judge/first"} <= row.keys() and "eval/gold_score" not in row
        assert row["eval/judge/calls"] == len(judge.asked) > 0
        folder.evaluations.unlink()
        asked = len(judge.asked)
        (again,) = evaluate(changed(folder, words), folder, only=["model"])
        assert len(judge.asked) == asked and again["eval/win_rate"] == row["eval/win_rate"]
        judge.model = "other"
        with pytest.raises(UserError, match="gold.model must be a model at"):
            evaluate(changed(folder, [*words, "gold.answer=text"]), folder, only=["model"])


def test_preference_pairs_are_relabelled_by_a_judge_whose_answers_stay(tmp_path):
    words = ["I", "can", "not", "sleep", "at", "night", "Someone", "just", "stole"]
    prompts = [" ".join(words[: i + 1]) for i in range(8)]
    rows = [{"prompt": prompt, "chosen": "sleep", "rejected": "I can sleep"} for prompt in prompts]
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with served(FakeJudge()) as judge:
        gold = ["scorer@gold=judge", f"gold.url={judge.url}", "gold.model=judge"]
        cfg = relabel.pairs_of([*TINY, f"task.preferences_path={tmp_path}", *gold])
        relabel.relabel(cfg, tmp_path / "out")
    report = json.loads((tmp_path / "out" / "relabel.json").read_text())["splits"]
    assert [report[split]["swapped"] for split in ("train", "validation")] == [8, 8]
    assert len(answers_in(tmp_path / "out" / "judgements" / "gold.jsonl")) == len(judge.asked) == 16


def make_judge(folder: Path) -> None:
    """Save a tiny random Llama with a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {sign: i for i, sign in enumerate([*alphabet, "<|end|>", "<|pad|>"])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    )
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    ends = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), **sizes, **heads, **ends)).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a tiny random Llama with vLLM, whose wheel for CPUs has no command `vllm serve`."""
    make_judge(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = [
        "--model",
        str(folder),
        "--served-model-name",
        "tiny",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    small = ["--dtype", "float32", "--max-model-len", "2048", "--enforce-eager", "--max-num-seqs", "8"]
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *place, *small]
    own = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(program, stdout=log, stderr=log, env=own, start_new_session=True)

    def ready() -> bool:
        try:
            return requests.get(f"http://127.0.0.1:{port}/health", timeout=1).ok
        except requests.RequestException:
            return False

    try:
        wait_for(ready, seconds=400)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.nightly
def test_vllm_judges_a_whole_run_and_json_without_end_is_named(tiny, tmp_path):
    pytest.importorskip("vllm", reason=needs.VLLM)
    (tmp_path / "rubric.yaml").write_text("Is polite: 1\nIs rude: -1\n")
    with serve(tmp_path / "judge") as url:
        own = ["scorer=judge", f"scorer.url={url}", "scorer.model=tiny", "schedule.total_episodes=32"]
        for number, more in enumerate(
            (
                ["scorer.answer=choice"],
                ["scorer.answer=choice", "scorer.kind=rank"],
                ["scorer.answer=choice", "scorer.kind=grade"],
                ["scorer.answer=choice", "scorer.kind=rubric", f"scorer.rubric={tmp_path}/rubric.yaml"],
                ["scorer.answer=logprobs", "scorer.unreadable=1"],
            )
        ):
            folder = RunFolder(tmp_path / f"run{number}")
            run(tiny(*own, *more), folder)
            rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
            shares = [row["judge/unreadable"] for row in rows if "judge/unreadable" in row]
            assert folder.finished() and shares and (number == 4 or not any(shares))
        with pytest.raises(UserError, match=r"scorer\.answer=choice.*scorer\.max_tokens"):
            run(tiny(*own, "scorer.max_tokens=64"), RunFolder(tmp_path / "json"))


@pytest.mark.nightly
def test_a_run_starts_one_server_for_its_judges_and_starts_it_again_if_it_is_killed(
    command, tiny, tmp_path, monkeypatch
):
    pytest.importorskip("vllm", reason=needs.VLLM)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    make_judge(tmp_path / "judge")
    small = "{dtype: float32, max_model_len: 2048, enforce_eager: true, max_num_seqs: 8}"
    words = ["schedule.total_episodes=256", "schedule.save_every=1", "eval.prompts=8"]
    for group, at in ("scorer", "scorer"), ("scorer@gold", "gold"):
        words += [f"{group}=judge", f"{at}.model={tmp_path}/judge", f"{at}.answer=choice"]
        words += [f"+{at}.arguments={small}", f"{at}.url=null"]  # debug=tiny has a judge without a server
    folder = RunFolder(tmp_path / run_name(tiny(*words)))
    process = subprocess.Popen([sys.executable, "-m", "rlhf.train", *command, *words])
    wait_for(lambda: folder.metrics.exists(), process, seconds=400)
    (server,) = servers(tmp_path)
    os.killpg(server.pid, signal.SIGKILL)
    assert process.wait(500) == 0 and folder.finished()
    assert not servers(tmp_path)
    for at in ("scorer", "gold"):
        keys = [row["key"] for row in answers_in(folder.path / "judgements" / f"{at}.jsonl")]
        assert len({*keys}) == len(keys) > 0, "a known answer was asked for"
    broken = [*words[:4], f"scorer.model={tmp_path}/none", *words[5:]]
    with pytest.raises(UserError, match="must serve the judge"):
        run(tiny(*broken), RunFolder(tmp_path / "broken"))


def servers(folder: Path) -> list[psutil.Process]:
    """Return the main processes of servers of the model `judge` in a folder."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if f"{folder}/judge" in each.cmdline() and "rlhf.generators.servers.process" in each.cmdline():
                found.append(each)
    return found
