"""Stage 3: vLLM with tiny models.

Shows that vLLM has the weights that the trainer sent: tokens and log-probs are those of the trained model
after each load, the version is confirmed, a seed repeats its samples, and damaged weights are rejected.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch

from rlhf.generators.process import WorkerGenerator
from rlhf.generators.weights import TransferError
from tests.gpu.report import Report
from tests.gpu.samplers import LIMITS, ask, change, differences, greedy_gap, need_vllm, rounded, started
from tests.gpu.shapes import HEADS, prompts, tiny

# kind of model, dtype of vLLM, whether vLLM compiles; a CPU runs the first case only
CASES = (("llama", "float32", False), ("qwen3", "bfloat16", True), ("gpt_neox", "bfloat16", False))


def run(report: Report) -> None:
    """Run the stage."""
    for kind, dtype, compiled in CASES:
        with report.part(f"{kind} in {dtype}" + (", compiled" if compiled else "")):
            need_vllm(report)
            if (kind, dtype, compiled) != CASES[0]:
                report.need_gpu()
            check_model(report, kind, dtype, compiled)


def check_model(report: Report, kind: str, dtype: str, compiled: bool) -> None:
    """Load three versions into vLLM and compare its tokens and log-probs with the model's."""
    model = rounded(tiny(kind, **HEADS).to(report.device))
    limit, given = LIMITS[report.device.type, dtype], prompts(8, 100)
    words = [f"generator.dtype={dtype}", f"generator.enforce_eager={str(not compiled).lower()}"]
    with started(report, model, *words, "generator.transfer=shared_memory") as generator:
        for version in range(3):
            if version:
                change(model, version)
            generator.load(model.state_dict().items(), version)
            likely = ask(generator, given, samples=1, temperature=0.0, purpose="eval")
            name = f"{kind} in {dtype}, version {version}"
            report.equal(f"version of {name}", likely.version, version)
            report.at_most(f"greedy tokens of {name}: distance to the best", greedy_gap(model, likely), limit)
            report.at_most(f"log-probs of {name}, greedy", differences(model, likely, 1.0), limit)
            sampled = ask(generator, given)
            report.at_most(f"log-probs of {name}, sampled", differences(model, sampled, 0.7), 2 * limit)
        again = ask(generator, given)
        same = (again.response_ids == sampled.response_ids).all(-1).float().mean()
        # On a GPU, the cached prompts of the second request change the rounding of its logits.
        report.at_least(f"equal responses of {kind} for one seed", float(same), 0.9 if report.gpu else 1.0)
        other = ask(generator, given, request=1)
        differ = (other.response_ids != sampled.response_ids).any(-1).float().mean()
        report.at_least(f"different responses of {kind} for another request", float(differ), 0.5)
        check_rejected(report, kind, generator, model)


def check_rejected(report: Report, kind: str, generator: WorkerGenerator, model: torch.nn.Module) -> None:
    """Send a tensor with a wrong checksum: the generator must stop with an error that names the version."""
    write = generator.store.write

    def damaged(*arguments):
        manifest = write(*arguments)
        first, *rest = manifest.entries
        return replace(manifest, entries=(replace(first, checksum=first.checksum ^ 1), *rest))

    try:
        with patch.object(generator.store, "write", damaged):
            generator.load(model.state_dict().items(), 3)
        ask(generator, prompts(8, 100))
        said = "no error"
    except TransferError as error:
        said = str(error)
    report.equal(f"damaged weights of {kind} are rejected", "version 3" in said, True)
