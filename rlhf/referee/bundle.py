"""Bundles: one update of a run in one file, recorded by repeating the run from its last checkpoint before it.

    batch/<field>         the batch before credit, as computed                                     [N, K, ...]
    credited/<field>      what credit added or changed: advantages, signal, returns, the samples of pairs
    step<i>/rows          prompts of optimizer step i, from 1                                      [M]
    step<i>/<output>      an output of the trained model, such as logprobs                         [N, K, T]
    step<i>/<output>_grads its gradient, as autograd had it: logprob_grads                         [N, K, T]
    file/<path>           tokenizer, answers of judges, and what `Engine.save` wrote before the update, as bytes
    header                config.yaml, versions, counters, texts, state of the objective, metrics of each step,
                          XXH3 of the weights before and after the update

The loop does not change: the session that gives the loop its verbs notes what passes through them.
"""

from __future__ import annotations

import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.nn.functional import pad

from rlhf.config.run import LoggersConfig, Progress, Resume
from rlhf.core.batch import Batch, Outputs, tensors_of
from rlhf.core.errors import UserError
from rlhf.core.files import read_lines
from rlhf.core.launched import RESULTS, __version__
from rlhf.core.metrics import Metrics
from rlhf.engines.engine import Engine, full
from rlhf.objectives.objective import Objective
from rlhf.referee.file import write
from rlhf.runs.folder import RunFolder, complete_checkpoints, processor, versions
from rlhf.stages.run import run
from rlhf.training.session import Session, TokenLoss
from rlhf.words.compose import load_config

TEXTS = ("texts", "references", "dialogues", "tools", "records", "completions", "places")
VARYING = ("time/", "throughput/", "memory/")  # metrics that differ between two equal runs


class Recorded(BaseException):
    """The update is recorded, and the repeated run ends; no `Exception`, because nothing failed."""


class Tape:
    """What one update computes: tensors and a header, in the form of the file."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.header: dict[str, Any] = {"kind": "bundle", "steps": []}
        self.shape = torch.Size()  # of the responses that are trained on, [N, K, T]

    def credit(self, objective: Objective, batch: Batch) -> Batch:
        """Note a batch before and after credit; the result has the number of its row at each token."""
        before, kinds = tensors_of(batch), int | float | list
        self.header["objective"] = objective.state_dict()
        self.header["batch"] = {name: x for name, x in batch.as_dict().items() if isinstance(x, kinds)}
        credited = objective.credit(batch)
        new = {name: x for name, x in tensors_of(credited).items() if x is not before.get(name)}
        self.tensors |= {f"batch/{name}": x.clone() for name, x in before.items()}
        self.tensors |= {f"credited/{name}": x.clone() for name, x in new.items()}
        self.shape = credited.response_mask.shape
        row = torch.arange(len(credited), device=credited.response_ids.device).view(-1, 1, 1)
        return replace(credited, per_token={**(credited.per_token or {}), "row": row.expand(self.shape)})

    def step(self, minibatch: Batch) -> None:
        """Note the prompts of the next optimizer step."""
        self.header["steps"].append({})
        self.tensors[f"{self.at}/rows"] = rows_of(minibatch).cpu()

    def watch(self, micro: Batch, outputs: Outputs) -> None:
        """Note the outputs of the trained model for a micro-batch, and later their gradients."""
        for name, x in outputs._asdict().items():
            if x is not None and x.requires_grad:
                at = f"{self.at}/{name}"
                self.put(at, micro, x.detach())
                x.register_hook(partial(self.put, f"{at.removesuffix('s')}_grads", micro))

    def stepped(self, metrics: Metrics) -> None:
        """Note the metrics of the optimizer step."""
        values = {name: stat.value() for name, stat in metrics.items()}
        self.header["steps"][-1] = {name: value for name, value in values.items() if value is not None}

    @property
    def at(self) -> str:
        """The beginning of the names of this optimizer step."""
        return f"step{len(self.header['steps'])}"

    def put(self, name: str, micro: Batch, x: Tensor) -> None:
        """Note a tensor [M, K, ...] of a micro-batch at the rows of the minibatch."""
        missing = self.shape[-1] - micro.response_mask.shape[-1]
        x = pad(x.cpu().float(), (0, missing)) if x.dim() == 3 else x.cpu().float()
        whole = self.tensors.setdefault(name, torch.zeros(self.shape[0], *x.shape[1:]))
        whole[rows_of(micro).cpu()] = x


def rows_of(batch: Batch) -> Tensor:
    """Return the rows [M] of the prompts of a part of the batch that `Tape.credit` returned."""
    assert batch.per_token is not None
    return batch.per_token["row"][:, 0, 0]


class TapedSession(Session):
    """The session of a repeated run: it records one update, then ends the run; it evaluates and saves nothing.

    Args:
        tape: gets what the update computes.
        recorded: the number of the update, from 1.
        weights: whether the tape gets the weights and the optimizer before the update.
        arguments: those of `Session`.
    """

    def __init__(self, tape: Tape, recorded: int, weights: bool, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tape, self.recorded, self.weights = tape, recorded, weights

    @property
    def now(self) -> bool:
        """Whether the update that is recorded has begun, and is not counted yet."""
        return self.state.update == self.recorded - 1

    def credit(self, batch: Batch) -> Batch:
        """Return the batch with credit; note both, and the state of the run before the update."""
        if not self.now:
            return super().credit(batch)
        engine, counters = self.parts.engine, self.state.state_dict()
        limits = {"sequences": engine.settings.budget.sequences, "tokens": engine.settings.budget.tokens}
        self.tape.header |= {"before": digest(engine), "state": counters, "limits": limits}
        self.tape.header["machine"] = machine(engine.ranks.device.type)
        with TemporaryDirectory() as scratch:
            folder = Path(scratch)
            engine.tokenizer.save_pretrained(folder / "tokenizer")
            if self.weights:
                engine.save(folder)
            self.tape.tensors |= packed(folder)
        return self.tape.credit(self.parts.objective, batch)

    def forward_backward(self, minibatch: Batch, loss: Objective | TokenLoss | None = None) -> Metrics:
        """Compute gradients, while the tape watches the outputs of the model."""
        if self.now:
            self.tape.step(minibatch)
            self.parts.engine.watch = self.tape.watch
        return super().forward_backward(minibatch, loss)

    def step(self) -> Metrics:
        """Make an optimizer step, and note its metrics."""
        metrics = super().step()
        if self.now:
            self.tape.stepped(metrics)
        return metrics

    def sync(self, batch: Batch) -> None:
        """End an update; raise Recorded after the one that is recorded."""
        ends = self.now
        super().sync(batch)
        if ends:
            self.tape.header["after"] = digest(self.parts.engine)
            raise Recorded

    def evaluate(self) -> None:
        """Evaluate nothing: an evaluation changes no update."""
        self.state.unevaluated = False

    def save(self) -> None:
        """Write no checkpoint."""


def digest(engine: Engine) -> str:
    """Return 16 hex digits of all weights of the trained module."""
    total = xxhash.xxh3_64()
    for name, x in engine.module.named_parameters():
        bits = full(x.detach()).cpu().contiguous().flatten().view(torch.uint8)
        total.update(name.encode() + bits.numpy().tobytes())
    return total.hexdigest()


def packed(folder: Path) -> dict[str, Tensor]:
    """Return the files of a folder as tensors `file/<path>` of bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    return {
        f"file/{path.relative_to(folder).as_posix()}": torch.frombuffer(
            bytearray(path.read_bytes()), dtype=torch.uint8
        )
        for path in files
    }


def updates_of(folder: RunFolder) -> dict[int, dict[str, Any]]:
    """Return the rows of the updates of a run by their numbers, without what varies between equal runs."""
    rows = [row for row in read_lines(folder.metrics, ["update"]) if "lr" in row]
    return {row["update"]: {k: v for k, v in row.items() if not k.startswith(VARYING)} for row in rows}


def machine(device: str) -> dict[str, str]:
    """Return on what bits depend besides the code: processor, device and libraries."""
    names = ("torch", "transformers")
    kind = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {"device": device, "processor": f"{processor()}, {kind}", **{n: versions()[n] for n in names}}


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
    quiet = {"logger": LoggersConfig(), "progress": Progress.off, "save_generations": False}
    cfg = load_config(folder.config).with_({**quiet, "resume": Resume.auto, "push_to": None})
    tape = Tape()
    with TemporaryDirectory(dir=out.absolute().parent, prefix=".tmp-") as scratch:
        copy = RunFolder(Path(scratch) / folder.path.absolute().name)
        copied(folder.path, copy.path, update)
        with redirect_stdout(StringIO()):
            try:
                run(cfg, copy, check=False, session=partial(TapedSession, tape, update, weights))
            except Recorded:
                again = updates_of(copy).get(update)
        tape.header["config"] = folder.config.read_text(encoding="utf-8")
        tape.header |= {"version": __version__, "results": RESULTS, "threads": torch.get_num_threads()}
        if not texts:
            tape.header["batch"] = {k: v for k, v in tape.header["batch"].items() if k not in TEXTS}
    same = None if update not in rows else rows[update] == again
    write(out, tape.tensors, {**tape.header, "step": update, "framework": "rlhf", "same_row": same})
    return same


def copied(run: Path, to: Path, update: int) -> None:
    """Copy what the repetition of an update reads: config, start time, answers of judges, last checkpoint."""
    to.mkdir()
    for name in ("config.yaml", "environment.json"):
        shutil.copy(run / name, to)
    if (run / "judgements").is_dir():
        shutil.copytree(run / "judgements", to / "judgements")
    before = [each for each in complete_checkpoints(run) if int(each.name.partition("-")[2]) < update]
    if before:
        shutil.copytree(before[-1], to / before[-1].name)
