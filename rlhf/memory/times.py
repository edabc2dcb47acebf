"""The time of a run, estimated from its work and from the rates of its devices, or from a measured run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from statistics import median

from rlhf.config.algorithms import Trains
from rlhf.config.root import Config
from rlhf.config.schema import data_file
from rlhf.core.errors import UserError
from rlhf.core.launched import world_size
from rlhf.core.machine import Machine
from rlhf.memory.plan import device, with_token_limit
from rlhf.memory.sizes import Model, ModelSize, matrix_parameters, models, most_sequences
from rlhf.memory.uses import PROMPT_TOKENS, Tokens, Trainer
from rlhf.runs.folder import RunFolder
from rlhf.words.compose import load_config

# The seconds of an update are the sum of its work, each part divided by a rate of the device:
#
#     pass through the blocks   launches of kernels + FLOP / flops + bytes of activations / bytes
#     output head               FLOP / flops + bytes of logits / logits
#     training                  3 passes (a frozen base model: 2), one more with gradient checkpointing; the
#                               head's FLOP 4 times, its logits 3 times; 28 bytes per trained parameter
#     a step of decoding        launches + FLOP / flops + bytes of weights, activations and cache / bytes
#
# All sequences have the maximum length, so a run with shorter sequences takes less time. A batch is divided
# into forward passes as for the memory plan (`rlhf.memory.uses`).

PHASES: dict[str, list[str]] = data_file("rlhf.memory", "phases.yaml")["metrics"]
FROM_RUN = 1.3  # times from a measured run are expected within this factor


Rates = Mapping[str, float]  # the rates that a device reaches: a row of devices.yaml, which explains them

DEVICES: dict[str, Rates] = data_file("rlhf.memory", "devices.yaml")


class Clock:
    """The seconds of the parts of an update on one rank.

    Args:
        cfg: the config of the run.
        rates: the rates of the device.
        machine: the memory of this host, which limits forward passes.
    """

    def __init__(self, cfg: Config, rates: Rates, machine: Machine) -> None:
        self.cfg, self.rates, kind = with_token_limit(cfg, machine), rates, device(cfg, machine)
        ranks = max(world_size(), cfg.backend.ranks or 1)
        self.trainer = Trainer(self.cfg, tuple(models(cfg)), ranks, kind)
        self.number = 4 if kind == "cpu" else 2  # bytes of an operand of a matrix product

    def pass_s(self, size: ModelSize, tokens: Tokens, trained: Model | None = None) -> float:
        """Return the seconds of a forward pass; if the model is `trained`, also of the backward pass."""
        rates, shapes = self.rates, list(tokens.passes(eager=False))
        encoded = sum(rows * queries for rows, queries, _ in shapes)
        pairs = sum(rows * queries * keys for rows, queries, keys in shapes)
        flops = 2 * matrix_parameters(size) * encoded + 4 * size.layers * size.query_width * pairs
        moved = _activations(size) * encoded * (rates["fused"] if self.cfg.backend.compile else 1)
        blocks = rates["launch"] * size.layers * len(shapes) + flops / rates["flops"] + moved / rates["bytes"]
        logits = tokens.sequences * tokens.response * size.vocabulary
        head, choice = 2 * logits * size.hidden / rates["flops"], 4 * logits / rates["logits"]
        if trained is None:
            return blocks + head + choice
        passes = (3 if trained.adapters is None else 2) + self.cfg.model.gradient_checkpointing
        return passes * blocks + 4 * head + 3 * choice

    def sampling_s(self, prompts: int, samples: int) -> float:
        """Return the seconds to sample responses of full length."""
        size, rates, own = self.trainer.policy, self.rates, self.cfg.generator.decodes
        rows = min(prompts * samples, own or getattr(self.cfg.generator, "max_num_seqs", 256))
        one = self.trainer.tokens(samples, samples)
        together = max(1, min(prompts, PROMPT_TOKENS[self.trainer.device] // one.prompt))
        prefix = Tokens(prompts=together, samples=1, prompt=one.prompt, response=1, apart=False)
        compiled = getattr(self.cfg.generator, "compile", False)
        cached = rows // one.decoded_a_row(eager=False) * one.prompt + rows * one.response / 2
        read = self.number * size.parameters + size.cache(1, self.number) * cached
        read += rows * _activations(size) * (rates["fused"] if compiled else 1)
        attended = 4 * size.layers * size.query_width * (one.prompt + one.response / 2)
        flops = rows * (2 * (matrix_parameters(size) + size.vocabulary * size.hidden) + attended)
        work = flops / rates["flops"] + read / rates["bytes"] + 4 * rows * size.vocabulary / rates["logits"]
        launch = rates["decode"] * (0.5 if compiled else 1) * size.layers
        if not own:  # vLLM's scheduler works at the same time as the device
            launch, work = 0.6 * launch, max(work, rates["row"] * rows)
        prefill = math.ceil(prompts / together) * self.pass_s(size.scoring(), prefix)
        return prefill + math.ceil(prompts * samples / rows) * one.response * (launch + work)

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase of an update (`PHASES`), as if none overlapped."""
        cfg, trainer, rates, schedule = self.cfg, self.trainer, self.rates, self.cfg.schedule
        samples, kept = cfg.algo.samples_per_prompt, cfg.algo.keeps or cfg.algo.samples_per_prompt
        share, found = math.ceil(schedule.prompts_per_update / trainer.ranks), dict.fromkeys(PHASES, 0.0)
        most = min(most_sequences(cfg), max(kept, share * kept // schedule.minibatches))
        tokens = trainer.tokens(most, kept)
        for model in (each for each in trainer.models if each.trained):
            passes = share / tokens.prompts * self.pass_s(model.counted, tokens, model)
            steps = schedule.minibatches * 28 * model.trainable / rates["bytes"]
            found["training"] += schedule.epochs * (passes + steps)
        for size, batch in [] if cfg.algo.supervised else self._read():
            tokens = trainer.tokens(batch, samples)
            found["log-probs and scores"] += share / tokens.prompts * self.pass_s(size, tokens)
        if cfg.generator.samples:
            ranks = trainer.ranks if cfg.generator.on_each_rank(schedule.max_lag) else 1
            prompts = math.ceil(schedule.prompts_per_update / ranks / cfg.generator.replicas)
            found["sampling"] = self.sampling_s(prompts, samples)
        if cfg.has_worker:
            found["weights"] = self.number * trainer.policy.parameters / rates["transfer"]
            found["weights"] += rates["wake"] * cfg.generator.shares_gpu
        return found

    def _read(self) -> Iterator[tuple[ModelSize, int]]:
        """Yield the model and the sequences per pass of the passes without gradients over all samples."""
        policy, *others = self.trainer.models
        if self.cfg.schedule.minibatches * self.cfg.schedule.epochs > 1:  # log-probs before the first step
            yield policy.counted, policy.batch_size
        if self.cfg.algo.teacher_url is None and all(each.role != "reference" for each in others):
            yield policy.counted, policy.batch_size  # the policy without adapters
        yield from ((each.counted, each.batch_size) for each in others if each.role != "judge")

    def evaluation_s(self) -> float:
        """Return the seconds of an evaluation: responses to held-out prompts, and two passes over them."""
        count, tokens = self.cfg.eval.prompts, self.trainer.tokens(self.trainer.models[0].batch_size, 1)
        sampled = 0.0 if self.cfg.algo.trains is Trains.reward else self.sampling_s(count, 1)
        return sampled + 2 * count / tokens.prompts * self.pass_s(self.trainer.policy, tokens)


def update_s(cfg: Config, phases: Mapping[str, float]) -> float:
    """Return the seconds of an update; with a lag, sampling overlaps with the other phases."""
    sampling, whole, lag = phases["sampling"], sum(phases.values()), cfg.schedule.max_lag
    return max(sampling, whole - sampling, whole / (lag + 1)) if lag else whole


def run_s(cfg: Config, clock: Clock, update: float) -> float:
    """Return the seconds of all updates, of `update` seconds each, and evaluations of a run."""
    every, updates = cfg.schedule.eval_every, cfg.num_updates()
    evaluations = 1 + math.ceil(updates / every if every >= 1 else 1 / every) if every else 0
    return updates * update + evaluations * clock.evaluation_s()


def from_run(folder: RunFolder, rates: Rates, machine: Machine, phases: dict[str, float]) -> dict[str, float]:
    """Return the seconds of `phases`, each times the ratio of the measured to the estimated seconds of a run.

    Measured are the medians of the updates in metrics.jsonl, without the first update.

    Raises:
        UserError: the run has fewer than two updates.
    """
    text = folder.metrics.read_text(encoding="utf-8") if folder.metrics.is_file() else ""
    updates = [row for row in map(json.loads, text.splitlines()) if "time/train_s" in row][1:]
    if not updates:
        raise UserError(f"run= must be a run with two updates or more, got {folder.path}; leave run= out")
    known, found = Clock(load_config(folder.config), rates, machine).phases(), dict(phases)
    for phase, names in PHASES.items():
        seen = median(sum(row.get(name, 0.0) for name in names) for row in updates)
        found[phase] *= seen / known[phase] if known[phase] else 1
    return found


def _activations(size: ModelSize) -> float:
    """Return the bytes of activations that a token moves in all layers."""
    return 4 * size.layers * (8 * size.hidden + (4 if size.gated else 3) * size.intermediate)
