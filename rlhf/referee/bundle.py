"""Bundles: one update of a run in one file, recorded by repeating the run from its last checkpoint.

    batch/<field>           the batch before credit, as computed                               [N, K, ...]
    credited/<field>        what credit added or changed: advantages, signal, samples of pairs
    step<i>/rows            prompts of optimizer step i, from 1                                [M]
    step<i>/<output>        an output of the trained model, such as logprobs                   [N, K, T]
    step<i>/<output>_grads  its gradient, as autograd had it, such as logprob_grads            [N, K, T]
    file/<path>             bytes: tokenizer, answers of judges, what `Engine.save` wrote before the update
    header                  config.yaml, versions, counters, texts, state of the objective, metrics of each
                            step, XXH3 of the weights before and after the update

The loop does not change: a session records what passes through the verbs that the loop calls.
"""

from __future__ import annotations

import shutil
from contextlib import redirect_stdout
from dataclasses import fields, replace
from functools import partial
from io import StringIO
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerFast
from transformers.utils import cached_file

from rlhf.assembly.training import build_scorer
from rlhf.config.root import Config
from rlhf.config.run import LoggersConfig, Progress, Resume
from rlhf.config.scorers import judges
from rlhf.core.batch import Batch, Outputs, Rollouts
from rlhf.core.errors import UserError
from rlhf.core.files import append, flat, read_lines
from rlhf.core.launched import RESULTS, __version__
from rlhf.core.metrics import Metrics
from rlhf.engines.engine import OPTIMIZER_FILE, Engine, full
from rlhf.models.loading import save, stop_ids
from rlhf.models.modules import Policy, is_adapted
from rlhf.objectives.objective import Objective
from rlhf.processes.ranks import ALONE
from rlhf.referee.file import write
from rlhf.runs.folder import RunFolder, complete_checkpoints, processor, versions
from rlhf.scorers.judge import Row, answers_in
from rlhf.stages.run import run
from rlhf.training.session import Session
from rlhf.words.compose import load_config

ANSWERS = "answers.jsonl"  # of all judges that score the batch
SUFFIXES = {".json", ".safetensors", ".txt", ".model", ".jinja", ".jsonl", ".template", ".rubric"}
# Metrics that differ between two equal runs; those of a judge say how often it was asked.
VARYING = ("time/", "throughput/", "memory/", "judge/")


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """Return the tensors of a batch by name, not copied; those of a dict are `<field>.<key>`."""
    return {name: x for name, x in flat(batch.as_dict()) if isinstance(x, Tensor)}


class Recorded(BaseException):
    """The update is recorded, and the repeated run ends; no `Exception`, because nothing failed."""


class Tape:
    """What an update computes: tensors and a header in the form of the file, and a folder of files for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, Tensor] = {}
        self.header: dict[str, Any] = {"kind": "bundle", "steps": []}

    def before(self, engine: Engine) -> None:
        """Note on what the update depends besides the batch, and watch the outputs of the model."""
        device, limits, names = engine.ranks.device.type, engine.settings.budget, ("torch", "transformers")
        gpu = [torch.cuda.get_device_name()] if device == "cuda" else []
        machine = [device, *gpu, processor(), torch.backends.cpu.get_cpu_capability()]
        self.header["machine"] = [*machine, *(versions()[name] for name in names), torch.get_num_threads()]
        self.header |= {"before": digest(engine), "limits": [limits.sequences, limits.tokens]}
        self.tokenizer, start = engine.tokenizer, engine.module.model.name_or_path  # "": random weights
        ends = stop_ids(self.tokenizer, [start] if start else [])
        self.header |= {"pad_id": self.tokenizer.pad_token_id, "eos_ids": ends}
        engine.watch = self.watch

    def credit(self, objective: Objective, batch: Batch) -> Batch:
        """Note a batch before and after credit; the result has the number of its row at each token."""
        self.batch, before, kinds = batch, tensors_of(batch), int | float | list
        self.header["objective"] = objective.state_dict()
        self.header["batch"] = {name: x for name, x in batch.as_dict().items() if isinstance(x, kinds)}
        self.tensors |= {f"batch/{name}": x.clone() for name, x in before.items()}
        credited = objective.credit(batch)
        for name, x in tensors_of(credited).items():
            if x is not before.get(name):
                self.tensors[f"credited/{name}"] = x.clone()
        self.shape = credited.response_mask.shape
        row = torch.arange(len(credited), device=credited.response_ids.device).view(-1, 1, 1)
        return replace(credited, per_token={**(credited.per_token or {}), "row": row.expand(self.shape)})

    def stepped(self, minibatch: Batch, metrics: Metrics) -> None:
        """Note the prompts of an optimizer step, and its metrics."""
        self.tensors[f"{self.at}/rows"] = _rows(minibatch)
        self.header["steps"].append({name: stat.value() for name, stat in metrics.items()})

    @property
    def at(self) -> str:
        """The beginning of the names of this optimizer step."""
        return f"step{len(self.header['steps']) + 1}"

    def watch(self, micro: Batch, outputs: Outputs) -> None:
        """Note the outputs of the trained model for a micro-batch, and later their gradients."""
        for name, x in outputs._asdict().items():
            if x is not None and x.requires_grad:
                at = f"{self.at}/{name}"
                self.put(at, micro, x.detach())
                x.register_hook(partial(self.put, f"{at.removesuffix('s')}_grads", micro))

    def put(self, name: str, micro: Batch, x: Tensor) -> None:
        """Note a tensor [M, K, ...] of a micro-batch, whose padding was cut, in one of the whole batch."""
        missing = self.shape[-1] - micro.response_mask.shape[-1] if x.dim() == 3 else 0
        x = pad(x.cpu().float(), (0, missing))
        whole = self.tensors.setdefault(name, torch.zeros(self.shape[0], *x.shape[1:]))
        whole[_rows(micro)] = x


def _rows(batch: Batch) -> Tensor:
    """Return the rows [M] of the prompts of a part of the batch that `Tape.credit` returned."""
    assert batch.per_token is not None
    return batch.per_token["row"][:, 0, 0].cpu()


class TapedSession(Session):
    """The session of a repeated run: it records one update, then ends, without evaluations and checkpoints.

    Args:
        tape: gets what the update computes.
        update: the number of the update, from 1.
        weights: whether the tape gets the weights and the optimizer before the update.
        arguments: those of `Session`.
    """

    def __init__(self, tape: Tape, update: int, weights: bool, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tape, self.recorded, self.weights = tape, update - 1, weights
        self.schedule = replace(self.schedule, eval_every=0.0, save_every=0.0)  # they change no update

    def credit(self, batch: Batch) -> Batch:
        """Return the batch with credit; note both, and the state of the run before the update."""
        if self.state.update != self.recorded:
            return super().credit(batch)
        engine, folder = self.parts.engine, self.tape.folder
        self.tape.before(engine)
        self.tape.header["counters"] = [self.state.num_updates, self.state.version]
        engine.tokenizer.save_pretrained(folder / "tokenizer")
        if self.weights:
            engine.save(folder)
            if is_adapted(model := engine.module.model):  # the adapters are saved, not what they adapt
                base = cached_file(str(model.name_or_path), "config.json")
                shutil.copytree(Path(str(base)).parent, folder / "start")
            elif "divergence" in self.parts.objective.needs and isinstance(engine.reference, Policy):
                save(engine.reference.model, engine.tokenizer, folder / "reference")
        return self.tape.credit(self.parts.objective, batch)

    def step(self) -> Metrics:
        """Make an optimizer step, and note its metrics."""
        found, metrics = self._gradients, super().step()
        if found is not None and self.state.update == self.recorded:
            self.tape.stepped(found.batch, metrics)
        return metrics

    def sync(self, batch: Batch) -> None:
        """End an update; raise Recorded after the one that is recorded."""
        super().sync(batch)
        if self.state.update > self.recorded:
            self.tape.header["after"] = digest(self.parts.engine)
            raise Recorded


def digest(engine: Engine) -> str:
    """Return 16 hex digits of all weights of the trained module."""
    total = xxhash.xxh3_64()
    for name, x in engine.module.named_parameters():
        bits = full(x.detach()).cpu().contiguous().flatten().view(torch.uint8)
        total.update(name.encode() + bits.numpy().tobytes())
    return total.hexdigest()


def updates_of(folder: RunFolder) -> dict[int, dict[str, Any]]:
    """Return the rows of the updates of a run by their numbers, without what varies between equal runs."""
    rows = [row for row in read_lines(folder.metrics, ["update"]) if "lr" in row]
    return {row["update"]: {k: v for k, v in row.items() if not k.startswith(VARYING)} for row in rows}


def bundle(
    folder: RunFolder, update: int, out: Path, weights: bool = True, texts: bool = True
) -> bool | None:
    """Repeat a run in a copy of its folder from the last checkpoint before `update`, and write the bundle.

    Returns:
        Whether the repeated update has the metrics of the run; None: the run has no row of it.

    Raises:
        UserError: the run has not made the update.
    """
    rows = updates_of(folder)
    if not 1 <= update <= max(rows, default=0):
        made = f"1 to {max(rows)}" if rows else "none"
        raise UserError(f"--update must be an update that {folder.path} has made ({made}), got {update}")
    quiet = {"logger": LoggersConfig(), "progress": Progress.off, "save_generations": False, "push_to": None}
    cfg = load_config(folder.config).with_({**quiet, "resume": Resume.auto})
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.absolute().parent, prefix=".tmp-") as scratch:
        tape, copy = Tape(Path(scratch) / "files"), RunFolder(Path(scratch) / folder.path.absolute().name)
        before = [c for c in complete_checkpoints(folder.path) if int(c.name.partition("-")[2]) < update]
        copy.path.mkdir()
        for file in (folder.config, folder.environment):
            shutil.copy(file, copy.path)
        for part in filter(Path.is_dir, (folder.judgements.parent, *before[-1:])):
            shutil.copytree(part, copy.path / part.name)
        try:
            with redirect_stdout(StringIO()):
                run(cfg, copy, check=False, session=partial(TapedSession, tape, update, weights))
        except Recorded:
            again = updates_of(copy).get(update)
        if texts:
            save_answers(cfg, tape, copy.judgements)
        else:
            own = tape.header["batch"]
            tape.header["batch"] = {name: x for name, x in own.items() if not isinstance(x, list)}
        for path in filter(Path.is_file, sorted(tape.folder.rglob("*"))):
            name, content = path.relative_to(tape.folder).as_posix(), bytearray(path.read_bytes())
            if permitted(name) and content:
                tape.tensors[f"file/{name}"] = torch.frombuffer(content, dtype=torch.uint8)
        about = {"framework": "rlhf", "version": __version__, "results": RESULTS, "step": update}
        about |= {"config": folder.config.read_text(encoding="utf-8")}
        same = None if update not in rows else rows[update] == again
        write(out, tape.tensors, {**tape.header, **about, "same_row": same})
    return same


def permitted(name: str) -> bool:
    """Return whether a bundle may contain a file: its kind is never executed."""
    return PurePosixPath(name).suffix in SUFFIXES or name == OPTIMIZER_FILE


# Rewards that are computed again, from the answers that judges gave.


def rescored(
    cfg: Config, batch: Batch, tokenizer: PreTrainedTokenizerFast, answers: Path
) -> tuple[Batch, dict[str, Row]]:
    """Return the batch with rewards that are computed again, asking no judge, and the answers that were used.

    Args:
        cfg: the config of the run.
        batch: the batch.
        tokenizer: the tokenizer of the policy.
        answers: the file with the answers of all judges.
    """
    used: dict[str, Row] = {}
    scorer = build_scorer(cfg, "scorer", tokenizer, ALONE, judgements=answers, used=used)
    assert scorer is not None, "validated: training needs a scorer"
    rollouts = Rollouts(**{each.name: getattr(batch, each.name) for each in fields(Rollouts)})
    return scorer(rollouts), used


def save_answers(cfg: Config, tape: Tape, judgements: Path) -> None:
    """Write the answers of judges that the batch on the tape needs, and the texts of their questions."""
    asked = {at: judge for at, judge in judges(cfg).items() if at.startswith("scorer")}
    if not asked or cfg.scorer.reads_reward:
        return
    for file in sorted(judgements.parent.glob("scorer*.jsonl")):  # one for each judge and process
        append(judgements.with_name(ANSWERS), answers_in(file))
    used = rescored(cfg, tape.batch, tape.tokenizer, judgements.with_name(ANSWERS))[1]
    append(tape.folder / ANSWERS, used.values())
    for at, judge in asked.items():
        for name in ("template", "rubric"):
            if (text := getattr(judge, name)) is not None:
                shutil.copy(Path(text).expanduser(), tape.folder / f"{at}.{name}")
