"""Tests of a teacher on a server, with a server on the same machine that has a tiny model of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.assembly.parts import make
from rlhf.config.algorithms import DistillConfig, TeacherDivergence
from rlhf.config.models import Dtype
from rlhf.config.run import OptimConfig
from rlhf.config.scorers import ServedTeacherConfig
from rlhf.core.batch import Batch, Budget, Rollouts
from rlhf.core.errors import RunError
from rlhf.engines.engine import EngineSettings, TorchEngine
from rlhf.generators.process import Annotator
from rlhf.models.forward import infer
from rlhf.models.modules import Policy, ServedCandidates, Teacher
from rlhf.processes.ranks import ALONE
from rlhf.scorers.teacher import ServedTeacher
from rlhf.text.encoding import pad_prompts
from tests.served_teacher import MODEL, Answer, Reader, Stub
from tests.tiny_models import VOCABULARY, tiny_lm, tiny_rollouts, tiny_tokenizer

READER = Reader(tiny_lm(), tiny_tokenizer())
LIMIT_S = 5.0  # of a test with a server that hangs


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub(READER)
    made.start()
    yield made
    made.stop()


def teacher(
    stub: Stub, model: str = MODEL, top: int | None = None, divergence: str = "exact", **settings: Any
) -> ServedTeacher:
    served = ServedTeacherConfig(url=stub.url, **settings)
    config = DistillConfig(top=top, divergence=TeacherDivergence(divergence), teacher=served)
    return ServedTeacher(config, model, READER.tokenizer)


def in_this_process(rollouts: Rollouts) -> torch.Tensor:
    reference = Policy(tiny_lm(), 1.0, shared_prefix=True)
    return infer(reference, rollouts, "logprobs", Budget(8), ALONE, Dtype.float32)


def episodes(rollouts: Rollouts) -> Rollouts:
    """Return the rollouts with the third and fourth tokens as messages of an environment."""
    message = rollouts.response_mask.clone()
    message[..., :2], message[..., 4:] = False, False
    return replace(rollouts, response_mask=rollouts.response_mask & ~message, environment_mask=message)


def longer_prompts(rollouts: Rollouts) -> Rollouts:
    """Return the rollouts with a hint before the prompt that the teacher reads."""
    ids, mask = pad_prompts([[7, 9, 8][: 1 + len(ids) % 3] + ids for ids in rollouts.unpadded()], pad_id=0)
    return replace(rollouts, teacher_ids=ids, teacher_mask=mask)


@pytest.mark.parametrize("rollouts", [tiny_rollouts(5, 3), episodes(tiny_rollouts(5, 2))])
def test_log_probs_are_those_of_the_model_in_this_process(rollouts, stub):
    found = infer(teacher(stub), rollouts, "logprobs", Budget(4), ALONE, Dtype.float32)
    torch.testing.assert_close(found, in_this_process(rollouts), atol=1e-5, rtol=0)
    assert not found[~rollouts.response_mask].any()
    assert {each["max_tokens"] for each in stub.questions} == {1}


def scored(rollouts: Rollouts) -> Batch:
    scores = torch.zeros(rollouts.response_ids.shape[:2])
    return replace(rollouts, behaviour_logprobs=torch.zeros(rollouts.response_ids.shape)).extend(
        Batch, scores=scores
    )


def stepped(asked: ServedTeacher | None, rollouts: Rollouts, beta: float, top: int, micro: int) -> Tensor:
    """Return loss and gradient of the first step, with a served teacher or with the same in this process."""
    student, frozen = Policy(tiny_lm("llama"), 1.0, shared_prefix=True), Policy(tiny_lm(), 1.0, True)
    config, budget = DistillConfig(beta=beta, top=top, samples_per_prompt=2), Budget(micro)
    optim = OptimConfig(lr=1e-3, max_grad_norm=None)
    settings = EngineSettings(optim=optim, total_steps=9, steps_per_batch=1, budget=budget, inference=budget)
    engine, objective = TorchEngine(student, asked or frozen, None, ALONE, settings), make(config)
    student.teacher = ServedCandidates(beta) if asked else Teacher(frozen, beta, top)
    seen: list[Tensor] = []
    engine.optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([each.grad.flatten() for each in student.parameters()])) and None
    )
    batch = objective.credit(engine.annotate(scored(rollouts), objective.needs))
    loss = engine.step(batch, objective)["loss/policy"].value()
    assert loss > 0.1
    return torch.cat([torch.tensor([loss]), seen[0]])


@pytest.mark.parametrize(
    ("beta", "top", "micro", "rollouts"),
    [
        (1.0, 8, 16, tiny_rollouts(5, 2)),
        (0.0, 1, 1, tiny_rollouts(5, 2)),
        (0.3, VOCABULARY + 50, 16, episodes(tiny_rollouts(5, 2))),  # all tokens
        (1.0, 20, 16, longer_prompts(episodes(tiny_rollouts(5, 2)))),
    ],
)
def test_loss_and_gradient_are_those_of_the_teacher_in_this_process(beta, top, micro, rollouts, stub):
    expected = stepped(None, rollouts, beta, top, micro=4)
    found = stepped(teacher(stub, top=top), rollouts, beta, top, micro)
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected[1:].norm()), rtol=1e-5)
    assert {each["prompt_logprobs"] for each in stub.questions} == {min(top, VOCABULARY)}


def test_candidates_do_not_depend_on_micro_batches_or_on_the_process_that_asks(stub):
    asked, rollouts = teacher(stub, top=5), longer_prompts(episodes(tiny_rollouts(5, 2)))
    one, other = (
        Annotator(scored, asked, Budget(size), ALONE, Dtype.float32).annotate(rollouts) for size in (16, 1)
    )
    for name in ("ids", "logprobs"):
        assert torch.equal(one.candidates[name], other.candidates[name])
        assert one.candidates[name].shape == (*rollouts.response_ids.shape, 5)
        assert not one.candidates[name][~rollouts.response_mask].any()
    torch.testing.assert_close(one.ref_logprobs, in_this_process(rollouts.for_teacher()), atol=1e-5, rtol=0)
    plain = Annotator(scored, teacher(stub, top=5, divergence="k1"), Budget(16), ALONE, Dtype.float32)
    assert plain.annotate(rollouts).candidates is None
    assert stub.questions[-1]["prompt_logprobs"] == 0


def test_a_candidate_that_the_tokenizer_lacks_is_left_out_of_both_distributions(stub):
    rollouts = tiny_rollouts(3, 2)

    def third_has_no_token(question: dict[str, Any], which: int) -> tuple[int, Any]:
        found = READER.completion(question)
        entries = found["choices"][0]["prompt_logprobs"]
        for entry, token in zip(entries[1:], question["prompt"][1:], strict=True):
            (third,) = (each for each in entry if entry[each]["rank"] == 3)
            entry[str(VOCABULARY + 5)] = entry.pop(third)
            if third == str(token):
                entry[third] = {**entry[str(VOCABULARY + 5)], "rank": 4}
        return 200, found

    expected = stepped(teacher(stub, top=2), rollouts, 0.0, 2, 16)
    stub.answer = third_has_no_token
    found = stepped(teacher(stub, top=3), rollouts, 0.0, 2, 16)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected[1:].norm()), rtol=1e-5)


def test_the_token_itself_is_a_candidate_only_if_the_server_counts_it_among_them(stub):
    entry = {
        str(token): {"logprob": logprob, "rank": rank, "decoded_token": f"w{token - 3}"}
        for token, logprob, rank in ((9, -2.0, 3), (7, -0.5, 1), (8, -2.0, 2))  # 8 and 9 are equally probable
    }
    assert teacher(stub, top=2).read(entry, 9) == [-2.0, -0.5, 7, -2.0, 8]
    assert teacher(stub, top=3).read(entry, 9) == [-2.0, -2.0, 9, -0.5, 7, -2.0, 8]


def changed(change: Callable[[list[Any]], Any]) -> Answer:
    """Return an answer whose list of entries was changed."""

    def answer(question: dict[str, Any], which: int) -> tuple[int, Any]:
        found = READER.completion(question)
        change(found["choices"][0]["prompt_logprobs"])
        return 200, found

    return answer


def set_last(**values: Any) -> Answer:
    return changed(lambda entries: next(iter(entries[-1].values())).update(values))


WRONG: dict[str, tuple[Answer, str]] = {
    "no entry of the token": (changed(lambda entries: entries[-1].clear()), "for the token"),
    "no entries": (changed(lambda entries: entries.pop()), "log-probs of"),
    "none at all": (lambda question, which: (200, {"choices": [{"text": ""}]}), "status 200"),
    "no JSON object": (lambda question, which: (200, [1]), "status 200"),
    "another vocabulary": (set_last(decoded_token="the"), "for the token"),
    "no tokenizer": (set_last(decoded_token=None), "for the token"),
    "nan": (set_last(logprob=float("nan")), "for the token"),
    "what vLLM writes for nan": (set_last(logprob=-9999.0), "for the token"),
    "a text": (set_last(logprob="-1"), "for the token"),
    "an error of the server": (lambda question, which: (500, {"error": "engine"}), "status 500"),
    "a refused prompt": (
        lambda question, which: (400, {"error": "maximum context length"}),
        "context length",
    ),
}


def set_candidate(**values: Any) -> Answer:
    return changed(lambda entries: list(entries[-1].values())[-1].update(values))


WRONG_CANDIDATES: dict[str, tuple[Answer, str]] = {
    "a missing candidate": (changed(lambda entries: entries[-1].popitem()), "and 4 candidates"),
    "one more candidate": (changed(lambda entries: entries[-1].update(x={"rank": 1})), "and 4 candidates"),
    "no id": (
        changed(lambda entries: entries[-1].update(x=entries[-1].popitem()[1])),
        "status 200 and log-probs",
    ),
    "no number": (set_candidate(logprob=None), "and 4 candidates"),
    "what vLLM writes for nan": (set_candidate(logprob=-9999.0), "and 4 candidates"),
    "an error of the server": (lambda question, which: (500, {"error": "engine"}), "status 500"),
}
FAULTS = [(name, None) for name in WRONG] + [(name, 4) for name in WRONG_CANDIDATES]


@pytest.mark.parametrize(("fault", "top"), FAULTS)
def test_an_answer_that_cannot_be_used_is_an_error_with_the_key(fault, top, stub):
    stub.answer, said = (WRONG if top is None else WRONG_CANDIDATES)[fault]
    with pytest.raises(RunError, match=said) as error:
        teacher(stub, top=top, retries=1)(tiny_rollouts(2, 1))
    assert str(error.value).startswith("algo.teacher.url=http://127.0.0.1")


def test_more_candidates_than_the_server_sends_are_an_error_with_its_flag(stub):
    stub.answer = replace(READER, most=20)  # the default of vLLM
    with pytest.raises(RunError, match="max allowed: 20.*vllm serve a/teacher --max-logprobs 64"):
        teacher(stub, top=64)(tiny_rollouts(2, 1))
    teacher(stub, top=20)(tiny_rollouts(2, 1))


def test_another_model_on_the_server_is_an_error_with_its_name(stub):
    with pytest.raises(RunError, match="status 404.*other/model does not exist"):
        teacher(stub, "other/model")(tiny_rollouts(2, 1))


def test_a_server_that_hangs_is_an_error_within_its_limit(stub):
    stub.answer = lambda question, which: time.sleep(60)  # type: ignore[func-returns-value]
    begin = time.monotonic()
    with pytest.raises(RunError, match="did not answer in 2 tries of 0.3 s"):
        teacher(stub, timeout_s=0.3, retries=1)(tiny_rollouts(2, 1))
    assert time.monotonic() - begin < LIMIT_S


def test_a_server_that_starts_again_gets_the_request_again(stub):
    asked, rollouts = teacher(stub, retries=5, concurrency=1), tiny_rollouts(3, 1)
    asked(rollouts)
    stub.stop()
    again = threading.Timer(0.5, stub.start)
    again.start()
    found = asked(rollouts).logprobs
    again.join()
    torch.testing.assert_close(found, in_this_process(rollouts), atol=1e-5, rtol=0)


def test_the_key_of_the_server_is_sent_and_is_in_no_message(stub, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "hidden")
    stub.answer = lambda question, which: (401, {"error": "Unauthorized"})
    with pytest.raises(RunError, match="token_variable") as error:
        teacher(stub, token_variable="TEACHER_KEY")(tiny_rollouts(1, 1))
    assert "hidden" not in str(error.value)
