"""Stage 7: performance figures. They are never compared with a limit.

A GPU runs the shape of Pythia 410M in bfloat16, a CPU a tiny model in float32. Shares are of the matrix rate
and of the copy bandwidth that are measured at the start of the stage.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.against_trl.roofline import Flops, Rates, measure
from benchmarks.against_trl.roofline import rows as roofline_rows
from rlhf.assembly.parts import part
from rlhf.config.algorithms import DPOConfig
from rlhf.config.models import Dtype
from rlhf.config.run import OptimConfig
from rlhf.config.schema import SCHEMAS
from rlhf.core.batch import Batch, Budget, Prompts
from rlhf.engines.engine import Engine, EngineSettings
from rlhf.generators.hf.decoding import _REFUSED
from rlhf.generators.hf.generator import sample, uniforms
from rlhf.generators.process import WorkerGenerator
from rlhf.generators.weights import GpuWeights, SharedWeights, read
from rlhf.models.modules import Policy
from rlhf.objectives.dpo import OnlineDPO
from rlhf.processes.ranks import Ranks
from rlhf.trials.trials import BLOCKS, compare
from tests.gpu.kernel_rates import attentions, copies, heads, roomy
from tests.gpu.report import NO_GPU, Report, Skip
from tests.gpu.samplers import ask, need_vllm, started
from tests.gpu.shapes import PAD, batch, case_of, large, prompts, shape_of
from tests.tiny_models import tiny_tokenizer

EOS = 1  # never sampled by these models, so all responses have full length


class Sizes:
    """The sizes of the measured work, smaller on a CPU."""

    def __init__(self, gpu: bool) -> None:
        self.rows = (64, 512) if gpu else (8, 16)  # sequences decoded in parallel
        self.prompt, self.response = (128, 128) if gpu else (24, 16)  # tokens, of decoding
        self.forward = (4096, 16384, 32768) if gpu else (256, 512)  # tokens of a training forward
        self.sequence = (384, 128) if gpu else (24, 8)  # tokens of prompt and response, of training
        self.bytes = 2 if gpu else 4  # of a weight in a forward
        self.dtype = "bfloat16" if gpu else "float32"  # of vLLM


def run(report: Report) -> None:
    """Run the stage."""
    sizes = Sizes(report.full)
    with report.part("rates"):
        small = {} if report.full else {"size": 256, "numbers": 2**18}
        rates = Rates.measure(report.device, **small)
    for rows in sizes.rows:
        with report.part(f"hf, {rows} rows"), roomy():
            decode_hf(report, sizes, rows, rates)
    with report.part("training"):
        train(report, sizes, rates)
    with report.part("kernels of the head"):
        heads(report)
    with report.part("kernels of attention"), roomy():
        attentions(report)
    with report.part("16-bit copies of weights"), roomy():
        copies_of_weights(report, sizes)
    with report.part("transfer of weights"):
        transfer(report)
    with report.part("vllm"):
        decode_vllm(report, sizes, rates)
    with report.part("an update of online DPO"):
        busy(report, rates)
    for way in ("shared_memory", "nccl"):
        with report.part(f"vllm, weights by {way}"):
            load_vllm(report, sizes, way)


def wait(report: Report) -> float:
    """Wait until the device has finished its work; return the time."""
    if report.gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def autocast(report: Report) -> torch.autocast:
    """Return the context in which a run computes: bfloat16 on a GPU."""
    return torch.autocast(report.device.type, torch.bfloat16, enabled=report.gpu)


def decoding_gb(sizes: Sizes, rows: int, gpu: bool) -> float:
    """Return the GB that decoding must at least read: each step reads all weights, keys and values."""
    shape, steps = shape_of(gpu), sizes.response - 1  # the first token comes from encoding the prompt
    weights = 12 * shape.layers * shape.hidden_size**2 + shape.vocabulary * shape.hidden_size
    tokens = rows * (steps * sizes.prompt + steps * (steps + 1) // 2)
    return sizes.bytes * (steps * weights + 2 * tokens * shape.layers * shape.hidden_size) / 1e9


def decoding_figures(
    report: Report, name: str, sizes: Sizes, rows: int, seconds: float, rates: Rates, encoding: float = 0.0
) -> None:
    """Report tokens per second, and the share of the bandwidth that reading weights and cache takes.

    The share is that of the steps alone: `encoding`, the seconds in which the prompts are encoded, is
    subtracted if it is known.
    """
    report.figure(f"{name}, {rows} rows", rows * sizes.response / seconds, "tokens/s")
    share = decoding_gb(sizes, rows, report.gpu) / (seconds - encoding) / rates.gb_s
    report.figure(f"{name}, {rows} rows, of the bandwidth", 100 * share, "%")


def decode_hf(report: Report, sizes: Sizes, rows: int, rates: Rates) -> None:
    """Measure decoding with the Hugging Face model, with autocast as in a run; a GPU also compiles."""
    model = large(report.full, report.device, torch.float32)
    given = prompts(rows, sizes.prompt, shape_of(report.full).vocabulary, full=True)
    ids, mask = given.prompt_ids.to(report.device), given.prompt_mask.to(report.device)

    def fastest(length: int, compiled: bool) -> float:
        numbers, found = uniforms(1, 0, given.index, 1, length), []
        for _ in range(3):  # the first time, kernels are loaded
            start = wait(report)
            with autocast(report):
                _, real, *_ = sample(model, ids, mask, 1, length, 1.0, numbers, [EOS], PAD, compiled=compiled)
            found.append(wait(report) - start)
        report.equal(f"tokens of {rows} rows", int(real.sum()), rows * length)
        return min(found[1:])

    encoding = fastest(1, False)
    report.figure(f"encoding of {rows} prompts", 1e3 * encoding, "ms")
    for compiled in (False, True) if report.gpu else (False,):
        name = "decoding, hf" + (", compiled" if compiled else "")
        decoding_figures(report, name, sizes, rows, fastest(sizes.response, compiled), rates, encoding)
        report.equal(f"{name}, {rows} rows: fell back", model in _REFUSED, False)


def decode_vllm(report: Report, sizes: Sizes, rates: Rates) -> None:
    """Measure decoding with vLLM, and a load: by CUDA IPC on a GPU, by shared memory on a CPU."""
    need_vllm(report)
    model = large(report.full, report.device, torch.float32)
    words = [f"generator.dtype={sizes.dtype}", f"generator.max_num_seqs={max(sizes.rows)}"]
    words += ["generator.memory=0.4"] if report.gpu else []
    with started(report, model, *words, prompt=sizes.prompt, length=sizes.response) as generator:
        generator.load(model.state_dict().items(), 0)
        for rows in sizes.rows:
            given = prompts(rows, sizes.prompt, shape_of(report.full).vocabulary, full=True)
            settings = {"samples": 1, "temperature": 1.0, "response_length": sizes.response}
            found = [ask(generator, given, request=request, **settings) for request in range(2)][-1]
            decoding_figures(report, "decoding, vllm", sizes, rows, found.generate_s, rates)
        load_figure(report, generator, model, given)


def load_vllm(report: Report, sizes: Sizes, way: str) -> None:
    """Measure a load into vLLM: by shared memory on the trainer's GPU, by NCCL on the second GPU."""
    need_vllm(report)
    if way == "nccl" and not (report.gpu and torch.cuda.device_count() > 1):
        raise Skip("needs two GPUs")
    if not report.gpu:
        raise Skip(f"{NO_GPU}: on a CPU, the part vllm loads by shared memory")
    model = large(report.full, report.device, torch.float32)
    words = [f"generator.dtype={sizes.dtype}", "generator.enforce_eager=true", f"generator.transfer={way}"]
    name = "vllm" if way == "nccl" else "vllm_colocated"
    with started(report, model, *words, name=name, prompt=sizes.prompt) as generator:
        given = prompts(1, sizes.prompt, shape_of(report.full).vocabulary)
        generator.load(model.state_dict().items(), 0)
        ask(generator, given)
        load_figure(report, generator, model, given)


def load_figure(report: Report, generator: WorkerGenerator, model: PreTrainedModel, given: Prompts) -> None:
    """Measure a load into a vLLM that has loaded weights before, from the offer to the confirmation."""
    generator.figures()  # forget the loads before
    generator.load(model.state_dict().items(), 1)
    ask(generator, given, samples=1, response_length=1)
    seconds = generator.figures()["time/load_s"].value()
    assert generator.confirmed is not None
    moved = sum(entry.bytes for entry in generator.confirmed.entries) / 1e9
    report.figure(f"load by {type(generator.store).__name__}, vLLM", moved / seconds, "GB/s")


def train(report: Report, sizes: Sizes, rates: Rates) -> None:
    """Measure a training step, without the reference, for several numbers of tokens per forward."""
    objective, length = OnlineDPO(DPOConfig()), sum(sizes.sequence)
    for tokens in sizes.forward:
        with report.part(f"training, {tokens} tokens per forward"), roomy():
            engine = engine_of(report, tokens // length)
            count, vocabulary = 2 * tokens // length, shape_of(report.full).vocabulary  # two micro-batches
            given = batch(count // 2, 2, *sizes.sequence, vocabulary)
            given = replace(given, ref_logprobs=given.behaviour_logprobs)
            given = objective.credit(engine.annotate(given, objective.needs))
            with Flops() as flops:
                engine.step(given, objective)
            name = f"training, {tokens} tokens per forward"
            training_figures(report, name, engine, given, objective, flops.total, rates)
            with report.part(f"{name}, compiled"), roomy():
                report.need_gpu()  # on a CPU, the compiler takes longer than the rest of the stage
                one = given.select(torch.arange(len(given) // 2))  # a micro-batch
                trial = compare(engine, one.to(report.device))
                report.equal(f"{name}, compiled: fault", BLOCKS.fault(trial, engine.settings.dtype), None)
                report.figure(f"{name}, compiled: differences", trial.differences)
                report.figure(f"{name}, compiled: compilation", trial.preparation_s, "s")
                engine.module.use_compiled(True)
                engine.step(given, objective)
                training_figures(report, f"{name}, compiled", engine, given, objective, flops.total, rates)


def training_figures(
    report: Report, name: str, engine: Engine, given: Batch, objective: OnlineDPO, flops: float, rates: Rates
) -> None:
    """Measure three training steps of `flops` operations each, and report their rate."""
    start = wait(report)
    for _ in range(3):
        engine.step(given, objective)
    rate = 3 * flops / (wait(report) - start) / 1e12
    report.figure(name, rate, "TFLOP/s")
    report.figure(f"{name}, of the matrix rate", 100 * rate / rates.tflop_s, "%")


def engine_of(report: Report, sequences: int) -> Engine:
    """Return an engine that trains the measured model with plain torch, `sequences` per forward."""
    config: Any = SCHEMAS["schema/backend/torch"]()
    model = large(report.full, report.device, torch.float32)
    engine: Engine = part(config).build(
        config,
        module=Policy(model, 1.0, shared_prefix=False),
        reference=None,
        tokenizer=tiny_tokenizer(),
        ranks=Ranks(report.device),
        settings=EngineSettings(
            optim=OptimConfig(lr=1e-6),
            total_steps=100,
            steps_per_batch=1,
            budget=Budget(sequences),
            inference=Budget(sequences),
            dtype=Dtype.bfloat16 if report.gpu else Dtype.float32,
        ),
    )
    return engine


def copies_of_weights(report: Report, sizes: Sizes) -> None:
    """Measure a step of 8 micro-batches with and without 16-bit copies of weights that they share."""
    report.need_gpu()  # on a CPU the stage computes in float32
    objective, sequences = OnlineDPO(DPOConfig()), sizes.forward[0] // sum(sizes.sequence)
    engine = engine_of(report, sequences)
    given = batch(4 * sequences, 2, *sizes.sequence, shape_of(report.full).vocabulary)
    given = replace(given, ref_logprobs=given.behaviour_logprobs)
    copies(report, engine, objective, objective.credit(engine.annotate(given, objective.needs)))


def transfer(report: Report) -> None:
    """Measure the copies of all weights to shared memory, back, and to a snapshot on the device."""
    model = large(report.full, report.device, torch.float32)
    size = sum(tensor.nbytes for tensor in model.state_dict().values()) / 1e9
    shared, snapshots = SharedWeights(), GpuWeights(report.device, torch.bfloat16)
    for _ in range(2):  # the second time, the memory exists
        start = wait(report)
        manifest = shared.write(model.state_dict().items(), 0)
        written = wait(report) - start
        start = wait(report)
        arrived = sum(tensor.nbytes for _, tensor in read(manifest)) / 1e9
        seconds = wait(report) - start
        shared.release(manifest)
        start = wait(report)
        snapshot = snapshots.write(model.state_dict().items(), 0)
        copied = wait(report) - start
        snapshots.release(snapshot)
    shared.close()
    report.figure("write to shared memory", size / written, "GB/s of float32 weights")
    report.figure("read from shared memory", arrived / seconds, "GB/s")
    report.figure("snapshot on the device", size / copied, "GB/s of float32 weights")


def busy(report: Report, rates: Rates) -> None:
    """Measure the phases of an update of online DPO, as benchmarks.against_trl.roofline does."""
    report.need_gpu()
    case = case_of(report.full, report.materials)
    meter = measure(case, "ours", report.materials)
    for phase, ms, share, _, rate, of_peak, *_ in roofline_rows(case, meter, rates):
        report.figure(f"{phase}: time", float(ms), "ms")
        report.figure(f"{phase}: GPU busy", share)
        report.figure(f"{phase}: rate", f"{rate} TFLOP/s, {of_peak} of the matrix rate")
