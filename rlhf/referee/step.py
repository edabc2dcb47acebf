"""A step of a bundle: as a batch file with the settings of the run for the audit, and token by token."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rlhf.assembly.parts import make
from rlhf.config import algorithms as algos
from rlhf.config.schema import values
from rlhf.core.batch import Batch
from rlhf.core.errors import UserError, explained
from rlhf.core.formatting import printable
from rlhf.models.loading import read_tokenizer
from rlhf.objectives.correction import over_tokens
from rlhf.objectives.objective import Objective, old_or_behaviour
from rlhf.objectives.policy_gradient import PolicyGradient
from rlhf.referee.file import BatchFile, checked
from rlhf.referee.replay import batch_in, config_of, load, malformed, unpack

# Algorithms whose advantages the audit does not compute.
_GIVEN = algos.ScaleRLConfig | algos.ReinforcePPConfig | algos.DistillConfig
_RATIO = {"token": "token", "geometric": "sequence_mean", "sequence": "sequence_sum"}
_MEAN = {"tokens": "token", "responses": "sequence", "prompts": "prompt", "constant": "constant"}
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
        whole, batch, rows = (
            batch_in(file, "batch"),
            batch_in(file, "batch", "credited"),
            file.tensors[f"step{step}/rows"],
        )
        if batch.signal is not None and getattr(algo, "ties", None) is not algos.Ties.keep:
            rows = rows[batch.signal[rows]]  # the others are in no sum and no count
        part, metrics = batch.select(rows), head["steps"][step - 1]
        outputs = {
            name.partition("/")[2]: x[rows]
            for name, x in file.tensors.items()
            if name.startswith(f"step{step}/") and not name.endswith("rows")
        }
        found = {name: x for name in _FIELDS if (x := getattr(part, name)) is not None} | outputs
        if part.signal is not None:  # without a forward
            found["logprobs"] = torch.where(
                part.signal[:, None, None], outputs["logprobs"], old_or_behaviour(part)
            )
        found["behaviour_logprobs"] = (
            found.get("old_logprobs", found["logprobs"]) if part.on_policy else part.behaviour_logprobs
        )
        if part.values is not None:
            found |= {"old_values": part.values, "returns": part.returns, "value_mask": part.value_mask}
        found |= own_tensors(algo, part, found)
        claims, count = claimed(algo, objective, cfg.schedule.minibatches), part.response_ids.shape[1]
        tensors = {name: x.flatten(0, 1) for name, x in found.items() if x is not None}
        tensors["losses"] = torch.tensor([metrics["loss/policy"]])
        header = {
            "framework": "rlhf",
            "version": head["version"],
            "step": f"{head['step']}.{step}",
            "claims": claims,
        }
        header |= {"kind": "pairs"} if isinstance(algo, algos.DPOConfig) else {}
        if isinstance(objective, PolicyGradient):
            samples = torch.arange(count)
            tensors |= {
                "group": rows.repeat_interleave(count),
                "all_rewards": objective.scores(whole).flatten(),
            }
            tensors |= {
                "all_group": torch.arange(len(whole)).repeat_interleave(count),
                "all_index": (rows[:, None] * count + samples).flatten(),
            }
            header["updates_since_old"] = step - 1
        return checked(BatchFile(tensors, header, path))


def own_tensors(algo: Any, batch: Batch, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of some algorithms: weights of the policy term, counted tokens, a teacher."""
    extra, mask = batch.per_token or {}, batch.response_mask
    if "weights" in extra:
        counted = extra.get("trained", mask)
        return {"weights": torch.where(counted, extra["weights"], 0.0), "count_mask": counted}
    if "reach" in extra:
        return {"weights": (extra["reach"] != 0).float()}
    if isinstance(algo, algos.TOPRConfig):
        gap = torch.where(mask, found["logprobs"] - found["behaviour_logprobs"], 0.0)
        log_u = (
            gap
            if algo.level is algos.Level.token
            else over_tokens(gap, mask, algo.level is algos.Level.geometric)
        )
        avoid = batch.scores[..., None] <= 0 if algo.sign_of_score else batch.advantages < 0
        return {"weights": torch.where(avoid, log_u.clamp(max=0).exp(), 1.0)}
    if isinstance(algo, algos.BestOfKConfig):
        return {"advantages": mask.float()}
    return {"teacher_logprobs": batch.ref_logprobs} if isinstance(algo, algos.DistillConfig) else {}


def claimed(algo: Any, objective: Objective, minibatches: int) -> dict[str, Any]:
    """Return the settings of an algorithm in the words of `claims`.

    Raises:
        UserError: the audit has no recipe for them.
    """
    if (
        isinstance(algo, algos.DPOConfig)
        and algo.loss_type.value in ("sigmoid", "ipo", "hinge")
        and not algo.label_smoothing
        and algo.weighting.value == "none"
    ):
        reduction = "sequence" if algo.length_normalised else "sequence_sum"
        return {"surrogate": algo.loss_type.value, "beta": algo.beta, "reduction": reduction}
    if isinstance(algo, algos.BestOfKConfig):
        return {"advantage": "given", "surrogate": "reinforce", "reduction": "sequence_sum"}
    others = (
        not isinstance(algo, algos.PolicyGradientConfig)
        or algo.covariance.kind.value != "none"
        or algo.off_policy_mask is not None
    )
    if (
        others
        or algo.square_coef
        or algo.anchor.value not in ("old", "behaviour")
        or getattr(algo, "divergence", None) is algos.TeacherDivergence.exact
    ):
        raise UserError(f"the audit has no recipe for the loss of algo={algo.name} with these settings")
    found = {
        **{"kl_coef": objective.kl_coef, "kl_in": algo.kl_in.value, "kl": algo.kl_estimator.value},
        **{"clip_low": algo.clip_low, "clip_high": algo.clip_high, "dual_clip": algo.dual_clip},
        **{
            "anchor": algo.anchor.value,
            "ratio": _RATIO[algo.level.value],
            "advantage": "given",
            "scale": "none",
        },
        "kl_times_ratio": algo.kl_unbiased and ("token" if algo.level is algos.Level.geometric else True),
        "surrogate": "clip" if algo.has_ratio else "reinforce",
        "correction": values(algo.correction)
        if algo.correction.kind is not algos.CorrectionKind.none
        else {},
    }
    if isinstance(algo, algos.GRPOConfig):
        found["reduction"] = _MEAN[algo.mean_over.value]
        if not isinstance(algo, _GIVEN) and algo.advantage is not algos.Advantage.decoupled:
            found |= {"advantage": algo.advantage.value, "scale": algo.scale.value}
    if isinstance(algo, algos.RLOOConfig):
        found |= {"advantage": "leave_one_out", "reduction": "sequence" if algo.has_ratio else "sequence_sum"}
    elif isinstance(algo, algos.PPOConfig):
        found |= {"reduction": "token", "vf_coef": algo.vf_coef / 2, "clip_value": algo.clip_value}
        if minibatches == 1 and not algo.whiten_rewards:
            found |= {
                "advantage": "gae",
                "gamma": algo.gamma,
                "lam": algo.lam,
                "whiten": "tokens" if algo.whiten_advantages else "none",
            }
    elif isinstance(algo, algos.CISPOConfig):
        found["surrogate"] = "cispo"
    elif isinstance(algo, algos.ScaleRLConfig):
        found |= {"surrogate": "cispo", "clip_low": 1.0, "clip_high": algo.cap - 1}
    elif isinstance(algo, algos.M2POConfig):
        found |= {"clip_low": 1e9, "clip_high": 1e9, "anchor": "behaviour"}
    elif isinstance(algo, algos.TOPRConfig):
        found |= {"surrogate": "reinforce"} | (
            {"reduction": "sequence_sum"}
            if algo.mean_over is algos.Mean.tokens and algo.level is not algos.Level.token
            else {}
        )
    elif isinstance(algo, algos.DistillConfig):
        found |= {
            "policy_coef": algo.reward_coef,
            "teacher_coef": algo.teacher_coef,
            "teacher": algo.divergence.value,
            "teacher_gamma": algo.gamma,
            "teacher_cap": algo.cap,
        }
    elif isinstance(algo, algos.SAPOConfig | algos.VESPOConfig | algos.DPPOConfig):
        own = set(values(algo)) - set(values(algos.UnclippedConfig()))
        found |= {"surrogate": algo.name, "options": {name: getattr(algo, name) for name in own}}
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
