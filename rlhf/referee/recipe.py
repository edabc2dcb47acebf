"""What a step computes, as a recipe, the numbers that a recipe gives on a batch file, and known mistakes.

GAE, ratio, clipping, KL, surrogates and corrections are those of `rlhf.objectives`, in float64. Statistics of
groups and reductions are this module's own, because other frameworks have groups of unequal size and
reductions that depend on the micro-batches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, permutations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor
from torch.nn import functional as F

from rlhf.assembly.parts import make
from rlhf.config import algorithms as config
from rlhf.config.schema import SCHEMAS, data_file
from rlhf.core.errors import UserError
from rlhf.core.metrics import selected
from rlhf.objectives.advantages import gae, whiten
from rlhf.objectives.correction import of_tokens, over_tokens
from rlhf.objectives.grpo import GRPO
from rlhf.objectives.objective import bounded
from rlhf.objectives.policy_gradient import kl_estimate
from rlhf.referee.file import BatchFile, Missing

TABLE: dict[str, Any] = data_file("rlhf.referee", "mistakes.yaml")
SETTINGS: dict[str, list[Any]] = TABLE["settings"]  # key -> default, term, meaning of each value
# Keys of a correction whose values are words
_WORDS: dict[str, Any] = {"kind": config.CorrectionKind, "level": config.Level}
_WORDS |= {"reject": config.Reject, "reject_by": config.Divergence}


class Recipe(SimpleNamespace):
    """The settings of a step, with the keys of `claims`, which mistakes.yaml lists (`settings`)."""

    def changed(self, **settings: Any) -> Recipe:
        """Return the recipe with other settings."""
        return Recipe(**{**vars(self), **settings})

    @classmethod
    def of(cls, file: BatchFile) -> Recipe:
        """Return the recipe of the claims of a file; a missing key has its default, another key is ignored.

        Raises:
            UserError: a value has the wrong type or is no value of its setting; it names all problems.
        """
        claims, problems = dict(file.header.get("claims") or {}), []
        if file.pairs:
            claims = {"pair_loss": claims.pop("surrogate", "sigmoid"), "reduction": "sequence_sum", **claims}
        recipe = cls(**TABLE["twists"], **{key: claims.get(key, row[0]) for key, row in SETTINGS.items()})
        for key, (default, _, *values) in SETTINGS.items():
            value, known = getattr(recipe, key), [*values[0]] if values else []
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            right = value in known or (number and not isinstance(default, str | bool))
            if isinstance(default, dict):
                right = isinstance(value, dict)
            if not right or (key == "temperature" and value <= 0):
                words = ", ".join(map(str, known)) or f"of the kind of {default}"
                problems.append(f"claims.{key} must be {words}, got {value!r}")
        try:
            _ = problems or (_objective(recipe), _correction(recipe))
        except (TypeError, ValueError) as error:
            problems.append(f"claims.options and claims.correction must have keys of rlhf, got {error}")
        if problems:
            raise UserError(*problems)
        return recipe


def _objective(recipe: Recipe) -> GRPO:
    """Return the objective that has the surrogate: that of an algorithm of its name, or GRPO."""
    section = SCHEMAS.get(f"schema/algo/{recipe.surrogate}", config.GRPOConfig)
    clips = {name: getattr(recipe, name) for name in ("clip_low", "clip_high", "dual_clip")}
    objective: GRPO = make(section(**{**clips, **recipe.options}))
    return objective


def _correction(recipe: Recipe) -> config.CorrectionConfig:
    """Return the correction."""
    given = {key: x for key, x in dict(recipe.correction).items() if x is not None or key not in _WORDS}
    return config.CorrectionConfig(**{key: _WORDS.get(key, lambda x: x)(x) for key, x in given.items()})


class Parts(NamedTuple):
    """The parts of a step's loss: losses and gradients of tokens [2, B, T] of two terms, and their weight."""

    policy: Tensor
    penalty: Tensor
    weight: Tensor  # [B, 1]; the same for all tokens of a response, so it divides coupled gradients as well

    def losses(self) -> Tensor:
        """Return the losses of the tokens in the loss of the step [B, T]."""
        return (self.policy[0] + self.penalty[0]) * self.weight

    def gradient(self) -> Tensor:
        """Return the gradient of the loss of the step by the tokens [B, T]."""
        return (self.policy[1] + self.penalty[1]) * self.weight


# -- advantages ------------------------------------------------------------------------------------------


def _tokens(x: Tensor, mask: Tensor) -> Tensor:
    """Return numbers of responses [B] or tokens [B, T] as those of tokens, 0 outside the mask."""
    return selected(x if x.dim() == 2 else x[:, None], mask)


def _advantages(file: BatchFile, recipe: Recipe, rows: Tensor | slice) -> Tensor:
    """Return the advantages of the tokens [B, T] of some rows."""
    estimated, over_all = recipe.advantage.startswith("gae"), recipe.whiten in ("tokens", "scale")
    a = _estimated(file, recipe)[:, : file.mask.shape[1]] if estimated else compared(file, recipe)[0]
    if not (over_all or recipe.after or recipe.to_go):
        a, file, rows = a[rows], file.rows(rows), slice(None)
    a = _tokens(a, file.mask)
    if recipe.to_go:  # the KL of a token is subtracted from its own advantage and those before it
        a = a + (before := _penalty(file, recipe)).cumsum(1) - before
    if recipe.teacher_in_advantage:
        gap = file["teacher_logprobs"] - file.get("behaviour_logprobs", file["logprobs"])
        a = a + recipe.teacher_in_advantage * selected(gap, file.mask)
    if recipe.whiten in ("tokens", "scale"):
        where, free = file.get("whiten_mask", file.mask), 0 if recipe.std == "biased" else 1
        a = whiten(a, where, shift=recipe.whiten == "tokens", correction=free)
    return selected(moved(file, selected(a, file.mask), recipe.after), file.mask)[rows]


def _penalty(file: BatchFile, recipe: Recipe) -> Tensor:
    """Return what is subtracted from the rewards of tokens [B, T]."""
    if recipe.kl_in != "reward" or not recipe.kl_coef:
        return torch.zeros_like(file["logprobs"])
    before = file.get("old_logprobs", file.get("behaviour_logprobs", file["logprobs"]))
    kl = _kl(before, file["ref_logprobs"], recipe.kl)
    kl = selected(recipe.kl_coef * kl, file.get("kl_mask", file.mask))
    return kl / file.mask.sum(1, keepdim=True).clamp(min=1) if recipe.kl_mean else kl


def _estimated(file: BatchFile, recipe: Recipe) -> Tensor:
    """Return the advantages of states [B, S] by GAE; the score is the reward of the last state."""
    where, penalty = file["value_mask"], _penalty(file, recipe)
    values, place = selected(file["old_values"], where), where.cumsum(1)
    scored = {"gae_every": where, "gae_first": where & (place == 1)}
    last = where & (place == where.sum(1, keepdim=True))
    rewards = scored.get(recipe.advantage, last) * file["rewards"][:, None]
    if recipe.advantage == "gae_next":
        rewards = rewards + recipe.gamma * last * moved(file, file["old_values"], "<<0")
    rewards = rewards - F.pad(penalty, (0, where.shape[1] - penalty.shape[1]))
    a = gae(rewards, values, recipe.gamma, recipe.lam, where)
    return a + values if recipe.advantage == "gae_returns" else a


def compared(file: BatchFile, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Return the advantages [B] of compared rewards, in groups of any size, and what float32 may change."""
    r, g, rows = file["all_rewards"], file["all_group"], file["all_index"]
    r = r.index_add(0, rows, -_penalty(file, recipe).sum(-1))
    _, g, size = g.unique(return_inverse=True, return_counts=True)

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(len(size)).index_add(0, g, x)[g]

    count = size.max().expand(g.shape) if recipe.full else size[g]
    mean, free = total(r) / count, 0 if recipe.std == "biased" else 1
    known = {"batch": r.mean(), "none": torch.zeros(()), "others_by_all": (total(r) - r) / count}
    baseline = known.get(recipe.advantage, mean)
    if recipe.advantage == "opo":
        lengths = torch.ones_like(r).index_copy(0, rows, file.mask.sum(-1).double())
        baseline = total(r * lengths) / total(lengths)
    a, error = r - baseline, torch.full_like(r, 4 * torch.finfo(torch.float32).eps * float(r.abs().max()))
    if recipe.advantage == "leave_one_out":
        a = a * count / (count - 1).clamp(min=1)
    if recipe.scale != "none":
        variance = r.var(correction=min(free, len(r) - 1))
        if recipe.scale == "group":
            variance = total((r - mean).square()) / (count - free).clamp(min=1)
        spread = (variance if recipe.std == "variance" else variance.sqrt()) + recipe.std_eps
        a, error = a / spread, error / spread
    if recipe.whiten == "batch":
        spread = a.std(correction=min(free, len(a) - 1)) + recipe.std_eps
        a, error = (a - a.mean()) / spread, error / spread
    return a[rows], error[rows]


# -- the loss of a token ---------------------------------------------------------------------------------


def _kl(logprobs: Tensor, ref: Tensor, estimator: str) -> Tensor:
    """Return the estimates of the KL of tokens."""
    k1 = logprobs - ref
    known = {"k1": k1, "-k1": -k1, "k2": k1.square() / 2, "square": k1.square(), "abs": k1.abs()}
    known |= {"clamped k1": k1.clamp(min=0), "k3": kl_estimate(logprobs, ref, config.KLEstimator.k3)}
    known |= {"reverse k3": kl_estimate(ref, logprobs, config.KLEstimator.k3), "exp": (-k1).exp() - 1}
    return known[estimator]


def log_ratio(file: BatchFile, recipe: Recipe, logprobs: Tensor, level: str) -> Tensor:
    """Return log u, [B, T] or of responses [B, 1]; without the anchor's log-probs, u is 1."""
    fresh = recipe.anchor == "old" and "old_logprobs" not in file
    anchor = logprobs.detach() if fresh else file[f"{recipe.anchor}_logprobs"]
    gap = selected(logprobs - anchor, file.mask)
    if recipe.detached == "ratio":
        gap = gap.detach()
    unit = file.get("ratio_mask", file.mask)
    if level in ("token", "one", "reversed", "divided"):
        share = gap / unit.sum(1, keepdim=True).clamp(min=1)
        return {"token": gap, "one": gap - gap.detach(), "reversed": -gap, "divided": share}[level]
    whole = over_tokens(selected(gap, unit), unit, averaged=level != "sequence_sum")
    inner = whole if recipe.detached == "mean" else whole.detach()
    return inner + gap - gap.detach() if level == "sequence_token" else whole


def corrected(file: BatchFile, recipe: Recipe) -> BatchFile:
    """Return the file with the `weights` and the `count_mask` of the correction, unless it has its own."""
    given = _correction(recipe)
    if not recipe.correction or "weights" in file:
        return file
    old = file.get("trainer_logprobs", file.get("old_logprobs", file["logprobs"]))
    sampler = file.get("sampler_logprobs", file["behaviour_logprobs"])
    found = of_tokens(old, sampler, file.get("correction_mask", file.mask), given)
    return file.changed(weights=found["weights"], count_mask=found["trained"] & file.mask)


def policy_losses(file: BatchFile, recipe: Recipe, logprobs: Tensor) -> Tensor:
    """Return the losses [B, T] of tokens before the reduction, without KL."""
    a = _tokens(file["advantages"], file.mask)
    if recipe.detached == "advantage":  # that of a distillation: teacher - policy
        a = a - (logprobs - logprobs.detach())
    log_u = bounded(log_ratio(file, recipe, logprobs, recipe.ratio))
    batch: Any = SimpleNamespace(advantages=a, response_mask=file.mask)
    losses, _ = _objective(recipe).surrogate(log_u, logprobs, batch)
    if recipe.surrogate == "reinforce":
        losses = -a * logprobs
    elif recipe.surrogate == "dual":  # also where advantages are positive
        losses = torch.minimum(losses, -(recipe.dual_clip or 3.0) * a)
    elif recipe.surrogate in ("inverted", "bound", "attached"):
        bound = -a * log_u.exp().clamp(1 - recipe.clip_low, 1 + recipe.clip_high)
        smaller = torch.minimum(-a * log_u.exp(), bound)  # in place of the larger one
        losses = {"inverted": smaller, "attached": bound * logprobs}.get(recipe.surrogate, bound)
    weights = file.get("weights", torch.ones(()))
    if recipe.detached == "weights":  # those of the current policy, with a gradient
        found = of_tokens(logprobs, file["behaviour_logprobs"], file.mask, _correction(recipe))
        weights = found["weights"]
    return recipe.policy_coef * losses * weights


def penalties(file: BatchFile, recipe: Recipe, logprobs: Tensor) -> Tensor:
    """Return the penalties [B, T] of tokens: KL to the reference, and distance to the teacher."""
    losses = torch.zeros_like(logprobs)
    if recipe.kl_in == "loss" and recipe.kl_coef:
        kl = _kl(logprobs, file["ref_logprobs"], recipe.kl)
        if recipe.kl_times_ratio:
            level = recipe.ratio if recipe.kl_times_ratio is True else str(recipe.kl_times_ratio)
            factor = bounded(log_ratio(file, recipe, logprobs, level)).exp()
            kl = kl * (factor.detach() if recipe.detached == "kl_ratio" else factor)
        kl = kl * file["weights"] if recipe.kl_weighted else kl
        losses = losses + recipe.kl_coef * (kl.detach() if recipe.detached == "kl" else kl)
    if recipe.teacher_coef:  # as in rlhf.objectives.distill
        k = selected(logprobs - file["teacher_logprobs"], file.mask)
        sampler = file.get("behaviour_logprobs", logprobs).detach()
        ratio = bounded(selected(logprobs.detach() - sampler, file.mask)).exp()
        weight = ratio.clamp(max=recipe.teacher_cap) if recipe.teacher_cap else torch.ones_like(ratio)
        distance = _kl(k, torch.zeros_like(k), recipe.teacher)
        if recipe.teacher == "k1" and recipe.detached != "nothing":
            k = k if recipe.detached == "advantage" else k.detach()
            distance = gae(k, 0 * k, recipe.teacher_gamma, 1.0, file.mask) * logprobs
        losses = losses + recipe.teacher_coef * weight * distance
    return losses


def pair_losses(file: BatchFile, recipe: Recipe, logprobs: Tensor) -> Tensor:
    """Return the losses [B, T] of pairs, in the first column of the chosen row."""
    reference = selected(file["ref_logprobs"], file.get("ref_mask", file.mask)).sum(-1)
    z = selected(logprobs, file.mask).sum(-1) - moved(file, reference, recipe.after)
    if recipe.reduction == "sequence":
        z = z / file.mask.sum(-1).clamp(min=1)
    z = moved(file, z, recipe.paired)
    chosen, rejected = (z[i::2].detach() if recipe.detached == f"pair_{i}" else z[i::2] for i in (0, 1))
    z = chosen - rejected
    known = {"ipo": (z - 0.5 / z.new_tensor(recipe.beta)).square(), "hinge": F.relu(1 - recipe.beta * z)}
    known["smoothed"] = -0.9 * F.logsigmoid(recipe.beta * z) - 0.1 * F.logsigmoid(-recipe.beta * z)
    losses = known.get(recipe.pair_loss, -F.logsigmoid(recipe.beta * z))
    return F.pad(losses[:, None], (0, 2 * logprobs.shape[1] - 1)).view(logprobs.shape)


def value_losses(file: BatchFile, recipe: Recipe, values: Tensor) -> Tensor:
    """Return the losses [B, S] of values; without values of the rollout, nothing is clipped."""
    gap = (values - file["returns"]).square()
    if recipe.clip_value is not None:
        old = file["old_values"]
        bound = (values.clamp(old - recipe.clip_value, old + recipe.clip_value) - file["returns"]).square()
        larger = bound > gap
        gap = torch.where(larger if recipe.value_loss == "clipped" else ~larger, bound, gap)
    return recipe.vf_coef * gap


# -- the loss of the step --------------------------------------------------------------------------------


def parts(stage: str, file: BatchFile, recipe: Recipe, rows: Tensor | slice = slice(None)) -> Parts:
    """Return what a recipe gives for a stage; with `rows`, the losses and gradients of these only.

    Advantages and returns stand in place of losses and gradients.
    """
    none = torch.zeros(2, 1, 1)
    if stage == "advantages":
        found = _advantages(file, recipe, rows)
    elif stage == "returns":
        values = file["old_values"]
        if recipe.after == "advantages":
            a = F.pad(file["advantages"], (0, values.shape[1] - file.mask.shape[1]))
        else:
            a = _estimated(file, recipe)
        found = selected(a + values, file["value_mask"])
    if stage in ("advantages", "returns"):
        return Parts(found.expand(2, *found.shape), none, torch.ones(()))
    file = corrected(file, recipe) if stage == "loss" else file
    if stage == "values":
        file = file.changed(count_mask=file["value_mask"])
    own = None  # weight of the penalties
    if "kl_mask" in file or recipe.kl_reduction:
        alone = recipe.changed(reduction=recipe.kl_reduction or recipe.reduction)
        own = weights(file.changed(count_mask=file.get("kl_mask", file.get("count_mask"))), alone)[rows]
    weight, file = weights(file, recipe)[rows], file.rows(rows)
    names = ("values", "value_mask") if stage == "values" else ("logprobs", "response_mask")
    inputs, mask = (file[name] for name in names)
    if stage != "loss":
        term = pair_losses if stage == "pairs" else value_losses
        return Parts(_derived(partial(term, file, recipe), inputs, mask), none, weight)
    penalty = _derived(partial(penalties, file, recipe), inputs, file.get("kl_mask", mask))
    if own is not None:
        penalty = penalty * own / weight
    return Parts(_derived(partial(policy_losses, file, recipe), inputs, mask), penalty, weight)


def _derived(losses: Callable[[Tensor], Tensor], inputs: Tensor, mask: Tensor) -> Tensor:
    """Return losses and their gradients by `inputs`, stacked; both are 0 outside the mask."""
    x = selected(inputs, mask).requires_grad_()
    values = selected(losses(x), mask)
    gradient = torch.autograd.grad(values.sum(), x)[0] if values.requires_grad else torch.zeros_like(x)
    return torch.stack([values.detach(), gradient])


def weights(file: BatchFile, recipe: Recipe) -> Tensor:
    """Return the weight [B, 1] of the tokens of a response in the loss of the step.

    `over` is the step, `micro_batch`, `generation` (`tokens` of the header), or "n parts": means of n
    equal parts of the micro-batches, such as ranks, then their mean.
    """
    counted, micro = file.get("count_mask", file.mask), file["micro_batch"]
    lengths = counted.sum(-1, keepdim=True).double()
    ones = torch.ones_like(lengths) if recipe.empty == "counted" else (lengths > 0).double()
    count = int(micro.max()) + 1
    known = {"step": 1, "generation": 1, "micro_batch": count}
    number = known.get(recipe.over) or int(recipe.over.split()[0])
    if recipe.over not in known and (count % number or count == number):
        raise Missing(f"micro-batches of {number} ranks")
    place = micro * number // count

    def total(x: Tensor, at: Tensor) -> Tensor:
        return x.new_zeros(int(at.max()) + 1, 1).index_add(0, at, x)[at]

    if recipe.over == "generation":
        if recipe.reduction != "token":
            raise Missing("reduction for over=generation but token")
        size = torch.full_like(lengths, float(file["tokens"]))
    elif recipe.reduction == "token":
        size = total(lengths, place)
    elif recipe.reduction == "prompt":
        group = file["group"].unique(return_inverse=True)[1]
        size = total(lengths, group) * (group.max() + 1)
    else:
        size = total(ones, place) / (2 if file.pairs else 1)
        if recipe.reduction == "sequence" and not file.pairs:
            size = size * lengths.clamp(min=1)
        elif recipe.reduction == "constant":
            size = size * (recipe.max_tokens or counted.shape[1])
    return 1 / size.clamp(min=1) / number


def by_micro_batch(micro: Tensor, x: Tensor) -> Tensor:
    """Return the sums [M] of numbers [B, T] over micro-batches, given that of each row [B]."""
    return x.new_zeros(int(micro.max()) + 1).index_add(0, micro, x.sum(-1))


# -- the table of mistakes -------------------------------------------------------------------------------
#
# A mistake is a change of a file and a recipe. mistakes.yaml has special mistakes as rows, and families that
# `rows` writes out: each setting with each other value, coefficients, tensors and masks that are moved or
# exchanged.

Row = tuple[str, str, dict[str, Any]]  # term, words, what changes
_VIRTUAL = (*TABLE["names"], "trainer_logprobs", "sampler_logprobs")  # a file need not have them
TERMS = {**{key: row[1] for key, row in SETTINGS.items()}, **TABLE["tensors"]}
TERMS |= dict.fromkeys(TABLE["twists"], "loss")
_NAMES: dict[str, str] = TABLE["names"]
# Bounds of the log-ratio as bounds of the ratio
_IN_LOGS: dict[str, Callable[[float], float]] = {
    "below": lambda x: -math.expm1(-x),
    "above": lambda x: math.expm1(min(x, 700.0)),
}


def own_rows(path: Path) -> dict[str, list[Row]]:
    """Return the rows of mistakes of a file of the user, by stage.

    Raises:
        UserError: the file cannot be read, or a row is no row; it names all problems.
    """
    rule = f"{{{', '.join(TABLE['stages'])}: [[term, words, {{setting or tensor: value}}], ...]}}"
    try:
        stages = yaml.safe_load(path.read_text("utf-8")).items()
        found = {stage: [(str(a), str(b), dict(c)) for a, b, c in given] for stage, given in stages}
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        got = " ".join(str(error).split())
        raise UserError(f"--mistakes must be a YAML file with rows as {rule}, got {got}") from None
    names = {str(key).split(".")[0] for given in found.values() for *_, change in given for key in change}
    if unknown := [*(found.keys() - TABLE["stages"].keys()), *(names - TERMS.keys())]:
        raise UserError(f"{path} must have rows as {rule}, got {', '.join(map(str, unknown))}")
    return found


def rows(stage: str, recipe: Recipe) -> Iterator[Row]:
    """Yield the rows of a stage: special ones, then those of the families."""
    table = TABLE["stages"][stage]
    yield from table["rows"]
    yield from varied(stage, recipe)
    for family in ("factors", "moves", "shapes", "masks"):
        for name, (form, words) in product(table.get(family, []), TABLE[family]):
            yield TERMS[name], f"{_NAMES.get(name, name)} {words}", {name: form and form.format(name)}
    for names in table["exchanged"]:
        for a, b in permutations(names, 2):
            yield TERMS[a], f"{b} in place of {a}", {a: f"${b}"}
        for a, b in combinations(names, 2):
            yield TERMS[a], f"{a} and {b} are exchanged", {a: f"${b}", b: f"${a}"}


def varied(stage: str, recipe: Recipe) -> list[Row]:
    """Return the rows with other values of settings; rows that change fewer settings come first."""
    found: list[Row] = []
    for keys in TABLE["stages"][stage]["settings"]:
        for values in product(*(SETTINGS[key][2] for key in keys)):
            change = {k: v for k, v in zip(keys, values, strict=True) if v != getattr(recipe, k)}
            texts = [f"{k} is {v}, not {getattr(recipe, k)}: {SETTINGS[k][2][v]}" for k, v in change.items()]
            if change and values[0] not in ("given", "gae"):
                text = "; ".join(each.rstrip(": ") for each in texts)
                found.append((TERMS[next(iter(change))], text, change))
    return sorted(found, key=lambda row: len(row[2]))


def twisted(file: BatchFile, recipe: Recipe, change: dict[str, Any]) -> tuple[BatchFile, Recipe] | None:
    """Return file and recipe after the change of a row; None if the file lacks a tensor of the row."""
    tensors: dict[str, Tensor | None] = {}
    settings: dict[str, Any] = {}
    for name, given in change.items():
        value = given
        if isinstance(given, str) and (match := re.fullmatch(r"(?:([-\d.]+)\*)?\$([\w.]+) ?(\S*)", given)):
            factor, source, move = match.groups()
            own = file.get(source, file.mask if source.endswith("_mask") else None)
            value = getattr(recipe, source, recipe.correction.get(source.removeprefix("correction."), own))
            if isinstance(value, Tensor):
                value = moved(file, value, move)
            elif move and value is not None:
                value = _IN_LOGS[move](value)
            if value is None:
                return None
            value = value if factor is None else float(factor) * value
        if name.startswith("correction.") and recipe.correction:
            options = settings.get("correction", recipe.correction)
            settings["correction"] = {**options, name.removeprefix("correction."): value}
        elif hasattr(recipe, name):
            settings[name] = value
        elif name in file or name in _VIRTUAL:
            tensors[name] = value
        else:
            return None
    return file.changed(**tensors), recipe.changed(**settings)


def _by_part(micro: Tensor, like: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor like another one, with what `change` gives for the rows of each micro-batch."""
    found = torch.zeros_like(like)
    for part in micro.unique():
        found[micro == part] = change(micro == part)
    return found


def moved(file: BatchFile, x: Tensor, move: str) -> Any:
    """Return a tensor after a move; None if the tensor has not the dimensions."""
    rows, micro = len(x), file["micro_batch"]
    moves: dict[str, Callable[[], Any]] = {
        "": lambda: x,
        "vv": lambda: x.roll(1, 0),
        "^^": lambda: x.roll(-1, 0),
        "flipped": lambda: x.flip(0),
        "interleaved": lambda: torch.arange(rows) % len(x.unique()),
        "stride": lambda: torch.arange(rows) // int(x.unique(return_counts=True)[1].max()),
        "neighbours": lambda: torch.arange(rows) // max(1, rows // len(x.unique())),
        "by_micro_batch": lambda: x * len(micro) + micro if len(micro) == rows else None,
        "by_half": lambda: x * 2 + torch.arange(rows) * 2 // rows,
        "each": lambda: torch.arange(rows),
        "halves": lambda: torch.stack(x.chunk(2), 1).flatten(),
        "halves_of_parts": lambda: _by_part(micro, x, lambda at: torch.stack(x[at].chunk(2), 1).flatten()),
        "white": lambda: whiten(_tokens(x, file.mask), file.mask),
        "white_parts": lambda: _by_part(
            micro, file.mask.double(), lambda at: whiten(_tokens(x, file.mask)[at], file.mask[at])
        ),
        "with_prompt": lambda: torch.cat([x, file["prompt_mask"]], 1) if "prompt_mask" in file else None,
        "rounded": lambda: x.bfloat16().double(),
        "squared": lambda: x.square(),
        "signs": lambda: x.sign(),
        "positive": lambda: x.clamp(min=0),
        "absolute": lambda: x.abs(),
        "standard": lambda: (x - x.mean()) / x.std(correction=0).clamp(min=1e-8),
        **{f"within_{most}": partial(x.clamp, -most, most) for most in (1, 5, 10)},
        "inverted": lambda: 1 / x.clamp(min=1e-6),
    }
    if move in moves or x.dim() < 2:
        return moves.get(move, lambda: None)()
    if move[:2] in (">>", "<<"):
        by, edge = (1, 0) if move[0] == ">" else (-1, -1)
        rolled = x.roll(by, 1)
        if move[2:]:
            rolled[:, edge] = x[:, edge] if move[2:] == "=" else 0
        return rolled
    mask = x if x.dtype == torch.bool else file.mask if x.shape == file.mask.shape else torch.ones_like(x) > 0
    counts, width = mask.sum(1, keepdim=True), x.shape[1]
    if move == "sampled":
        ids, pad = file.get("response_ids"), file.header.get("pad_id")
        return None if ids is None or pad is None else mask | (ids != pad)
    if move == "of_part":
        longest = torch.stack([counts[micro == part].max() for part in micro.unique()])
        return torch.arange(x.shape[1]) < longest[micro][:, None]
    if move == "signal":
        return mask & (_tokens(file["advantages"], mask) != 0) if "advantages" in file else None
    after, before = moved(file, mask, ">>0"), moved(file, mask, "<<0")
    masks = {
        "left": x.gather(1, (torch.arange(width) + counts) % width),
        "mean": (selected(x, mask).sum(1, keepdim=True) / counts.clamp(min=1)).expand(x.shape),
        "longest": counts.max().item(),
        "all": mask.any(-1, keepdim=True).expand(mask.shape),
        "after": mask | after,
        "before": mask | before,
        "without_last": mask & before,
        "without_first": mask & after,
        "messages": mask | file.get("environment_mask", mask),
    }
    return masks.get(move)
