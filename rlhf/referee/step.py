"""A step of a bundle: as a batch file with the settings of the run for the audit, and token by token."""

from __future__ import annotations

from enum import Enum
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf.assembly.parts import make
from rlhf.config import algorithms as algos
from rlhf.config.schema import value_at, values
from rlhf.core.batch import Batch
from rlhf.core.errors import UserError, explained
from rlhf.core.formatting import printable
from rlhf.core.metrics import selected
from rlhf.models.loading import read_tokenizer
from rlhf.objectives.bok import BestOfK
from rlhf.objectives.distill import Distill
from rlhf.objectives.dpo import OnlineDPO
from rlhf.objectives.objective import Objective, old_or_behaviour, sampler_logprobs
from rlhf.objectives.policy_gradient import PolicyGradient
from rlhf.objectives.topr import TOPR
from rlhf.referee.file import BatchFile, checked
from rlhf.referee.replay import batch_in, config_of, load, malformed, unpack

_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text("utf-8"))
_FIELDS = ("response_mask", "response_ids", "environment_mask", "advantages", "old_logprobs", "ref_logprobs")


def batch_file(path: Path, step: int = 1) -> BatchFile:
    """Return an optimizer step of a bundle, from 1, as a batch file whose claims are the settings of the run.

    Raises:
        UserError: the bundle has no such step, or the audit has no recipe for the algorithm.
    """
    file = load(path)
    with TemporaryDirectory() as scratch, explained(malformed):
        cfg, head = config_of(file, Path(scratch)), file.header
        if not 1 <= step <= len(head["steps"]):
            raise UserError(f"--step must be from 1 to {len(head['steps'])}, got {step}")
        algo, objective = cfg.algo, make(cfg.algo)
        objective.load_state_dict(head["objective"])
        claims = claimed(algo, objective, cfg.schedule.minibatches)
        at, metrics = f"step{step}/", head["steps"][step - 1]
        whole, batch = batch_in(file, "batch"), batch_in(file, "batch", "credited")
        rows, count = file.tensors[f"{at}rows"], batch.response_ids.shape[1]
        if batch.signal is not None and getattr(algo, "ties", None) is not algos.Ties.keep:
            rows = rows[batch.signal[rows]]  # the others are in no sum and no count
        part = batch.select(rows)
        found = {name: getattr(part, name) for name in _FIELDS}
        outputs = {name.partition("/")[2]: x for name, x in file.tensors.items() if name.startswith(at)}
        found |= {name: x[rows] for name, x in outputs.items() if name != "rows"}
        now = found["logprobs"]
        if part.signal is not None:  # the model did not read the others
            now = torch.where(part.signal[:, None, None], now, old_or_behaviour(part))
        sampler = None if part.behaviour_logprobs is None else sampler_logprobs(now, part)
        found |= {"logprobs": now, "behaviour_logprobs": sampler}
        found |= {"old_values": part.values, "returns": part.returns, "value_mask": part.value_mask}
        found |= own_tensors(objective, part, found)
        tensors = {name: x.flatten(0, 1) for name, x in found.items() if x is not None}
        tensors["losses"] = torch.tensor([metrics["loss/policy"]])
        header = {"framework": "rlhf", "version": head["version"], "step": f"{head['step']}.{step}"}
        header |= {
            "claims": claims,
            "kind": "pairs" if isinstance(objective, OnlineDPO) else "policy_gradient",
        }
        if isinstance(objective, PolicyGradient):
            places = torch.arange(len(whole) * count).view(-1, count)
            compared = {
                "all_rewards": objective.scores(whole).flatten(),
                "all_group": places.flatten() // count,
            }
            tensors |= {**compared, "all_index": places[rows].flatten()}
            tensors["group"] = rows.repeat_interleave(count)
            header["updates_since_old"] = step - 1
        return checked(BatchFile(tensors, header, path))


def own_tensors(objective: Objective, batch: Batch, found: dict[str, Any]) -> dict[str, Any]:
    """Return tensors of some algorithms: weights of the policy term, counted tokens, a teacher."""
    extra, mask = batch.per_token or {}, batch.response_mask
    if "weights" in extra:
        counted = extra.get("trained", mask)
        return {"weights": torch.where(counted, extra["weights"], 0.0), "count_mask": counted}
    if "reach" in extra:
        return {"weights": (extra["reach"] != 0).float()}
    if isinstance(objective, TOPR):
        log_u = objective.log_ratio(found["logprobs"] - found["behaviour_logprobs"], mask)
        weighted, _ = objective.surrogate(selected(log_u, mask), -mask.float(), batch)
        return {"weights": (weighted / found["advantages"]).nan_to_num(1.0)}
    if isinstance(objective, BestOfK):
        return {"advantages": mask.float()}
    return {"teacher_logprobs": batch.ref_logprobs} if isinstance(objective, Distill) else {}


def claimed(algo: Any, objective: Objective, minibatches: int) -> dict[str, Any]:
    """Return the settings of an algorithm in the words of `claims`; claims.yaml has most of them.

    Raises:
        UserError: the audit has no recipe for them.
    """
    entries = _TABLE["algorithms"].get(algo.name, [])

    def read(key: str) -> Any:
        value = value_at(algo, key)
        return value.value if isinstance(value, Enum) else value

    known = [pair for entry in entries for pair in _TABLE["known"].get(entry, {}).items()]
    unknown = [key for key, accepted in known if read(key) not in accepted]
    for key in unknown if entries else ["name"]:
        raise UserError(f"the audit has no recipe for algo.{key}={read(key)} of algo={algo.name}")
    found: dict[str, Any] = {}
    for entry in entries:
        found |= {name: read(key) for name, key in _TABLE["fields"].get(entry, {}).items()}
        found |= _TABLE["values"].get(entry, {})
    for entry, when, claims in _TABLE["rules"]:
        if entry in entries and all(read(key) in accepted for key, accepted in when.items()):
            found |= claims
    if isinstance(objective, PolicyGradient):
        found["kl_coef"] = objective.kl_coef
        if algo.correction.kind is not algos.CorrectionKind.none:
            found["correction"] = {key: read(f"correction.{key}") for key in values(algo.correction)}
    if isinstance(algo, algos.PPOConfig):
        found["vf_coef"] = algo.vf_coef / 2
        found |= {"advantage": "given"} if minibatches > 1 else {}  # whitened over the whole batch
    elif isinstance(algo, algos.ScaleRLConfig):
        found["clip_high"] = algo.cap - 1
    elif isinstance(algo, algos.SAPOConfig | algos.VESPOConfig | algos.DPPOConfig):
        own = set(values(algo)) - set(values(algos.UnclippedConfig()))
        found["options"] = {name: getattr(algo, name) for name in own}
    return found


def token_table(path: Path, step: int, sample: int) -> Table:
    """Return a table of the tokens of a response of an optimizer step, both from 1.

    Columns: text, whether it is trained, log-probs of sampler and trainer and their difference, advantage,
    gradient by the log-prob, whether the loss is clipped (no gradient in spite of an advantage), version.

    Raises:
        UserError: the bundle has no such step or response.
    """
    file = load(path)
    with TemporaryDirectory() as scratch, explained(malformed):
        batch, at = batch_in(file, "batch", "credited"), f"step{step}/"
        rows, count = file.tensors.get(f"{at}rows", torch.zeros(0)).long(), batch.response_ids.shape[1]
        if not 1 <= sample <= len(rows) * count:
            raise UserError(f"--step {step} must have a response {sample}, got {len(rows) * count} responses")
        unpack(file, Path(scratch))
        tokenizer = read_tokenizer(str(Path(scratch) / "tokenizer"), key="tokenizer")
        row, k = int(rows[(sample - 1) // count]), (sample - 1) % count
        now, gradient = (file.tensors[at + name] for name in ("logprobs", "logprob_grads"))
        sampler = batch.behaviour_logprobs
        columns = {"sampler": sampler, "trainer": now, "mismatch": None if sampler is None else now - sampler}
        columns |= {"advantage": batch.advantages, "gradient": gradient, "version": batch.token_versions}
        shown = {name: x[row, k].tolist() for name, x in columns.items() if x is not None}
        table = Table("#", "token", "mask", *shown, "clip", title=f"prompt {row + 1}, sample {k + 1}")
        for place in batch.real[row, k].nonzero()[:, 0].tolist():
            text = Text(printable(str(tokenizer.decode([int(batch.response_ids[row, k, place])]))))
            numbers = [f"{x[place]:.4g}" for x in shown.values()]
            clipped = shown.get("advantage", [0.0] * (place + 1))[place] and not shown["gradient"][place]
            trained = "yes" if batch.response_mask[row, k, place] else "no"
            table.add_row(str(place + 1), text, trained, *numbers, "clipped" if clipped else "")
        return table


def as_page(table: Table) -> str:
    """Return a page of HTML with a table, which loads no other file; texts are escaped."""
    console = Console(record=True, file=StringIO(), width=160)
    console.print(table)
    return console.export_html()
