"""Tests of annotating generators: rollouts keep their order and get the trainer's scores and log-probs."""

import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlhf.assembly.training import AnnotatorFactory, build_generator
from rlhf.config.models import Dtype
from rlhf.config.scorers import AnswerScorerConfig, LabelsScorerConfig, WeightedScorerConfig
from rlhf.core.batch import Batch, Budget, Prompts, Sampling
from rlhf.core.errors import RunError
from rlhf.core.metrics import How, Stat
from rlhf.generators.generator import Generator
from rlhf.generators.process import AnnotatedGenerator, Annotator
from rlhf.generators.process import start as start_processes
from rlhf.models.loading import save
from rlhf.models.modules import Policy
from rlhf.objectives.dpo import OnlineDPO
from rlhf.processes.ranks import ALONE, Ranks
from rlhf.processes.signals import interruptible
from rlhf.processes.worker import Limits, Worker
from rlhf.runs.folder import RunFolder
from rlhf.scorers.scorer import LabelsScorer, TextScorer, WeightedScorer
from rlhf.training.stream import unpack
from rlhf.words.compose import compose
from tests.tiny_models import scorer_context, tiny_lm, tiny_rollouts, tiny_tokenizer

pytestmark = [pytest.mark.process, pytest.mark.forks]

SECONDS = 120  # timeout of a wait, in seconds


class Asked(Generator):
    """A generator or an annotator whose answers are set by the test."""

    def __init__(self, name):
        self.name = name
        self.futures, self.calls, self.failure = [], [], None

    def submit(self, prompts, sampling):
        self.futures.append(Future())
        return self.futures[-1]

    def put(self, job):
        if self.failure is not None:
            raise self.failure
        self.calls.append((job.method, *job.arguments))
        self.futures.append(job.future)
        return job.future

    def load(self, weights, version):
        self.calls.append(("load", list(weights), version))

    def figures(self):
        return {f"{self.name}/restarts": Stat(1.0, 1.0, How.sum)}

    def close(self):
        self.calls.append("close")


@pytest.fixture
def parts():
    generator, annotator = Asked("generator"), Asked("annotator")
    return AnnotatedGenerator(generator, annotator), generator, annotator


def ask(generator, purpose="train"):
    batch = tiny_rollouts()
    names = ("index", "texts", "references", "prompt_ids", "prompt_mask")
    prompts = Prompts(**{name: getattr(batch, name) for name in names})
    return generator.submit(prompts, Sampling(samples=2, temperature=0.7, response_length=7, purpose=purpose))


def labelled(**settings):
    return replace(tiny_rollouts(), labels=torch.arange(8.0).view(4, 2), **settings)


def test_training_rollouts_are_annotated_in_the_order_of_sampling_and_others_are_not(parts):
    whole, generator, annotator = parts
    for purpose in ("eval", "eval-kl"):
        future = ask(whole, purpose)
        generator.futures.pop().set_result(rollouts := tiny_rollouts())
        assert future.result(SECONDS) is rollouts and not annotator.calls
    futures = [ask(whole) for _ in range(3)]
    sampled = [labelled(version=version) for version in range(3)]
    for future, rollouts in zip(generator.futures, sampled, strict=True):
        future.set_result(rollouts)
    assert [rollouts.version for _, rollouts in annotator.calls] == [0, 1, 2]
    assert {method for method, _ in annotator.calls} == {"annotate"}
    assert not any(future.done() for future in futures)
    for future, rollouts in zip(annotator.futures, sampled, strict=True):
        future.set_result(rollouts.extend(Batch, scores=rollouts.labels))
    assert [future.result(SECONDS).version for future in futures] == [0, 1, 2]
    assert all(isinstance(future.result(), Batch) for future in futures)


def test_errors_of_generator_and_annotator_reach_the_waiting_caller(parts):
    whole, generator, annotator = parts
    sampled, annotated, refused = ask(whole), ask(whole), ask(whole)
    generator.futures[0].set_exception(RunError("no samples"))
    generator.futures[1].set_result(tiny_rollouts())
    annotator.futures[0].set_exception(RunError("no scores"))
    annotator.failure = RunError("no process")
    generator.futures[2].set_result(tiny_rollouts())
    for future, message in ((sampled, "no samples"), (annotated, "no scores"), (refused, "no process")):
        with pytest.raises(RunError, match=message):
            future.result(SECONDS)


def test_after_a_signal_rollouts_are_returned_without_annotations(parts):
    whole, generator, annotator = parts
    waiting, later = ask(whole), ask(whole)
    sampled = [tiny_rollouts(), tiny_rollouts()]
    generator.futures[0].set_result(sampled[0])
    whole.stop_annotating()
    assert annotator.calls[-1] == "close"
    annotator.futures[0].set_exception(annotator_closed := RunError("the annotator was closed"))
    annotator.failure = annotator_closed
    generator.futures[1].set_result(sampled[1])
    assert [future.result(SECONDS) for future in (waiting, later)] == sampled


def test_rollouts_of_a_checkpoint_are_annotated_if_they_were_not(parts):
    whole, _, annotator = parts
    plain = labelled()
    batch = plain.extend(Batch, scores=plain.labels)
    assert whole.resume(batch).result(SECONDS) is batch and not annotator.calls
    future = whole.resume(plain)
    assert [method for method, _ in annotator.calls] == ["annotate"]
    annotator.futures[0].set_result(batch)
    assert future.result(SECONDS) is batch


@pytest.mark.parametrize("asks_service", [False, True])
def test_load_reaches_the_generator_and_figures_and_close_reach_both(parts, asks_service, monkeypatch):
    _, generator, annotator = parts
    with interruptible() as interruption:
        whole = AnnotatedGenerator(generator, annotator, asks_service)
        assert len(interruption.callbacks) == asks_service, "a signal ends only a wait for a service"
        whole.load([("weight", torch.ones(1))], 3)
        assert generator.calls == [("load", [("weight", torch.ones(1))], 3)] and not annotator.calls
        assert whole.figures().keys() == {"generator/restarts", "annotator/restarts"}
        whole.close()
        assert generator.calls[-1] == annotator.calls[-1] == "close" and not interruption.callbacks
    annotator.calls.clear()
    monkeypatch.setattr(generator, "close", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        whole.close()
    assert annotator.calls == ["close"], "also if closing the generator fails"


@pytest.mark.parametrize(
    ("words", "device", "annotated"),
    [
        ("schedule.max_lag=1", "cpu", True),
        ("schedule.max_lag=2 generator=vllm", "cpu", True),
        ("schedule.max_lag=1", "cuda", False),
        ("schedule.max_lag=1 generator.annotate=true", "cuda", True),
        ("schedule.max_lag=1 generator.annotate=false", "cpu", False),
        ("generator.worker=true", "cpu", False),
        ("generator.worker=true generator.annotate=true", "cpu", True),
    ],
)
def test_an_annotator_starts_by_default_only_with_lag_and_without_gpu(
    monkeypatch, tmp_path, words, device, annotated
):
    started = []

    def start(kind):
        return lambda *arguments: started.append((kind, *arguments)) or Asked(kind)

    monkeypatch.setattr("rlhf.generators.process.WorkerGenerator", start("generator"))
    monkeypatch.setattr("rlhf.generators.process.Worker", start("annotator"))
    monkeypatch.setattr("rlhf.assembly.training.samples_with_cache", lambda *_: True)
    module = SimpleNamespace(model=tiny_lm())
    engine = SimpleNamespace(module=module, tokenizer=tiny_tokenizer(), borrow_policy=None, phases=None)
    cfg, ranks = compose(["model.policy=somewhere", *words.split()]), Ranks(torch.device(device))
    made = build_generator(cfg, engine, RunFolder(tmp_path), ranks)
    assert isinstance(made, AnnotatedGenerator) == annotated
    assert [kind for kind, *_ in started] == ["generator"] + ["annotator"] * annotated
    if annotated:
        _, name, make, log, environment, limits = started[1]
        assert (name, make.__self__.cfg, log) == ("annotator", cfg, tmp_path / "annotator.log")
        assert [environment, limits] == list(started[0][3:5]), (
            "without other GPUs the annotator has the environment and the limits of the generator"
        )


@pytest.mark.parametrize(
    ("generator", "gpus", "gpu"),
    [
        ("hf", 2, "1"),  # sampling and annotating share a GPU
        ("hf", 3, "1"),
        ("vllm", 3, "2"),
        ("vllm", 2, "0"),  # the GPU of the trainer, because vLLM has a fixed share of its own
        ("vllm generator.devices=[2]", 3, "1"),
        ("vllm_colocated schedule.max_lag=0", 2, "1"),
    ],
)
def test_the_annotator_uses_no_gpu_of_vllm(monkeypatch, tmp_path, generator, gpus, gpu):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr("rlhf.generators.process.WorkerGenerator", lambda *_: Asked("generator"))
    monkeypatch.setattr("rlhf.generators.process.Worker", lambda *given: given)
    words = ["schedule.max_lag=1", "generator.annotate=true", f"generator={generator.split()[0]}"]
    cfg = compose(words + generator.split()[1:])
    context = SimpleNamespace(
        ranks=Ranks(torch.device("cuda")), folder=tmp_path, in_flight=False, threads=1, max_lag=1
    )
    context.annotator, context.asks_service = None, False
    made = start_processes(cfg.generator, context, factory=None, variables=[{}])
    *_, environment, _ = made.annotator
    assert environment["CUDA_VISIBLE_DEVICES"] == gpu


@pytest.mark.parametrize(
    ("word", "gpu", "limit"),
    [
        ("generator=vllm", True, 1200.0),
        ("generator=vllm", False, 300.0),
        ("generator=hf", True, 300.0),
        ("generator.start_limit_s=9", True, 9.0),
    ],
)
def test_vllm_on_a_gpu_has_more_time_to_start(word, gpu, limit):
    assert compose([word]).generator.start_limit(on_gpu=gpu) == limit


def labels_scorer(kind=LabelsScorer):
    return kind(LabelsScorerConfig(), scorer_context(tiny_tokenizer()))


def weighted_scorer(**parts):
    return WeightedScorer(WeightedScorerConfig(parts=parts), scorer_context(tiny_tokenizer()))


def annotator(scorer=None, reference=None):
    return Annotator(scorer or labels_scorer(), reference, Budget(4), ALONE, Dtype.float32)


def test_annotate_adds_scores_reference_logprobs_and_the_seconds_it_took():
    model, rollouts = tiny_lm(), labelled(version=4, generate_s=2.0)
    batch = annotator(reference=Policy(model, 0.7, shared_prefix=True)).annotate(rollouts)
    assert torch.equal(batch.scores, rollouts.labels) and (batch.version, batch.generate_s) == (4, 2.0)
    with torch.no_grad():
        expected = Policy(model, 0.7, shared_prefix=False)(rollouts).logprobs
    torch.testing.assert_close(batch.ref_logprobs, expected, rtol=0, atol=1e-5)
    assert batch.annotate_ahead_s > 0 and batch.advantages is None


class Never(TextScorer):
    """A scorer that fails on every text."""

    def judge(self, prompt, response, reference):
        raise AssertionError("there is nothing to score")


def test_a_weighted_score_keeps_its_parts_and_a_scored_batch_is_not_scored_again():
    parts = {"labels": LabelsScorerConfig(weight=2.0), "again": LabelsScorerConfig()}
    batch = annotator(weighted_scorer(**parts)).annotate(rollouts := labelled())
    assert torch.equal(batch.scores, 3 * rollouts.labels) and batch.parts.keys() == parts.keys()
    assert all(torch.equal(part, rollouts.labels) for part in batch.parts.values())
    never = Never(AnswerScorerConfig(), scorer_context(tiny_tokenizer()))
    assert never(batch) is batch
    weighted = weighted_scorer(never=AnswerScorerConfig())
    weighted.parts["never"] = never
    assert weighted(batch) is batch


def test_a_scorer_error_names_the_log_and_is_written_to_it(capsys):
    class Broken(LabelsScorer):
        def score(self, rollouts):
            raise RunError("no score for row 3") from ValueError("out of ideas")

    with pytest.raises(RunError, match=r"no score for row 3 \(.* annotator\.log\)"):
        annotator(labels_scorer(Broken)).annotate(labelled())
    assert "out of ideas" in capsys.readouterr().err


def test_a_batch_in_flight_is_saved_and_loaded_with_its_annotations(tmp_path):
    batch = annotator(reference=Policy(tiny_lm(), 0.7, shared_prefix=True)).annotate(labelled(version=4))
    torch.save([batch.as_dict(), tiny_rollouts().as_dict()], tmp_path / "in_flight.pt")
    kept, plain = map(unpack, torch.load(tmp_path / "in_flight.pt", weights_only=True))
    assert isinstance(kept, Batch) and not isinstance(plain, Batch)
    assert torch.equal(kept.scores, batch.scores) and torch.equal(kept.ref_logprobs, batch.ref_logprobs)
    assert (kept.version, kept.annotate_ahead_s) == (4, batch.annotate_ahead_s)


@pytest.fixture
def settings(tmp_path):
    save(tiny_lm(), tiny_tokenizer(), tmp_path / "model")
    own = [f"model.policy={tmp_path / 'model'}", "task.max_prompt_tokens=64", "generator.response_length=32"]
    return compose([*own, "scorer=facts", "backend.micro_batch=4", f"cache_dir={tmp_path}"])


def test_an_annotator_uses_the_settings_of_the_run(settings, monkeypatch):
    settings.model.reference = settings.model.policy
    settings.scorer.missing_eos_score = -7
    made = AnnotatorFactory(settings).build(None)
    assert made.reference.temperature == settings.generator.temperature and made.budget == Budget(4)
    assert (made.annotate(tiny_rollouts()).scores == -7).all(), "no response has an end token"
    settings.model.reference = "nowhere"  # a path that cannot be loaded
    monkeypatch.setattr(OnlineDPO, "needs", frozenset())
    assert AnnotatorFactory(settings).build(None).annotate(tiny_rollouts()).ref_logprobs is None


def test_an_annotator_process_annotates_and_close_leaves_no_thread(settings, tmp_path):
    log, limits = Path(tmp_path / "annotator.log"), Limits(120, 60, restarts=0)
    process = Worker("annotator", AnnotatorFactory(settings).build, log, {"OMP_NUM_THREADS": "1"}, limits)
    generator = Asked("generator")
    whole = AnnotatedGenerator(generator, process)
    try:
        futures = [ask(whole), ask(whole)]
        generator.futures[0].set_result(rollouts := tiny_rollouts())
        batch = futures[0].result(120)
        expected = AnnotatorFactory(settings).build(None).annotate(rollouts)
        torch.testing.assert_close(batch.ref_logprobs, expected.ref_logprobs, rtol=0, atol=1e-5)
        assert torch.equal(batch.scores, expected.scores)
    finally:
        begun = time.monotonic()
        whole.close()
    assert time.monotonic() - begun < SECONDS / 4 and not process.carrier.is_alive()
    generator.futures[1].set_result(rollouts)
    with pytest.raises(RunError, match="the annotator was closed"):
        futures[1].result(SECONDS)
