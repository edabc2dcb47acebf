"""Check a batch file term by term, and name the first term that is wrong: by known mistakes or variants.

Every term is recomputed from the dumped inputs of this term, so a mistake in one term does not spread. A
stage of mistakes.yaml (advantages, returns, loss, pairs, values) is compared with its recipe. If the numbers
differ, the mistakes are tried: one, one and a factor, then two that change different parts of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.core.errors import UserError
from rlhf.core.metrics import selected
from rlhf.referee import recipe as recipes
from rlhf.referee.file import BatchFile, Missing
from rlhf.referee.recipe import SETTINGS, TABLE, Parts, Recipe, Row, by_micro_batch, moved

_ENOUGH = 2**16  # tokens that are enough to try mistakes


@dataclass(frozen=True)
class Finding:
    """The result for one term."""

    term: str
    state: str  # ok, wrong, unchecked
    text: str


def audit(file: BatchFile, own: dict[str, list[Row]] | None = None) -> list[Finding]:
    """Return a finding per term, in the order of the computation; without claims, the variant is identified.

    Args:
        file: the batch.
        own: rows of mistakes of the user, by stage.

    Raises:
        UserError: a claim has a wrong value.
    """
    recipe = Recipe.of(file)
    findings = [_mask(file), *_logprobs(file)]
    if recipe.correction and "behaviour_logprobs" in file:
        file = file.changed(weights=None)  # they are computed
    for name, row in TABLE["stages"].items():
        if file.pairs != (name == "pairs") or row.get("if", "logprobs") not in file:
            continue
        try:
            if name in ("advantages", "returns") and recipe.advantage == "given":
                raise Missing("settings that say how they are computed")
            findings += _Stage(file, recipe, name).findings((own or {}).get(name, []))
        except Missing as lacking:
            findings.append(Finding(row["term"], "unchecked", f"the file has no {lacking}"))
    return findings + list(_norms(file))


# -- stages ----------------------------------------------------------------------------------------------


class _Case(NamedTuple):
    """A mistake on a file: what it gives, and the fields of `parts` that it changes."""

    term: str
    text: str
    recipe: Recipe
    parts: Parts
    changed: set[str]


class _Stage:
    """Numbers of a file, and those that recipes give: a gradient or, without it, losses of micro-batches.

    Raises:
        Missing: the file has not what the recipe needs.
    """

    def __init__(self, file: BatchFile, recipe: Recipe, name: str) -> None:
        self.file, self.recipe, self.name, self.within = file, recipe, name, file.header["within"]
        self.row = TABLE["stages"][name]
        targets, inputs, mask = (self.row.get(key) for key in ("targets", "inputs", "mask"))
        target = next((each for each in targets if each in file), targets[0])
        self.found, self.size, self.error = file[target], 0.0, torch.zeros(1, 1)
        self.rows: Tensor | slice = slice(None)  # on which mistakes are tried
        self.base = self.compute(file, recipe)
        gradient = self.base.gradient()
        self.by_token = gradient.shape[:1] == self.found.shape[:1] and target == targets[0]
        if inputs:  # to which a difference of losses is relative: their values say little
            self.size = max(float((gradient * selected(file[inputs], gradient != 0)).abs().sum()), 1e-30)
        if name == "advantages" and not recipe.advantage.startswith("gae"):  # equal rewards, for example
            self.error = recipes.compared(file, recipe)[1][:, None]
        if self.by_token:
            self.found = self.found.view(len(file.mask), -1).expand(gradient.shape)
            if name == "loss" and file.header.get("dtype", "float32") != "float32":
                self.error = self.near(gradient)
            self.error = self.error.expand(gradient.shape)
            if mask:  # a gradient counts everywhere
                self.found = selected(self.found, file[mask])
            elif self.found.numel() > _ENOUGH:
                some = max(4, _ENOUGH // self.found.shape[1])
                self.rows = torch.linspace(0, len(self.found) - 1, some).long().unique()

    def compute(self, file: BatchFile, recipe: Recipe) -> Parts:
        """Return what a recipe gives for the rows on which mistakes are tried."""
        return recipes.parts(self.name, file, recipe, self.rows)

    def numbers(self, parts: Parts) -> Tensor:
        """Return what is compared with the numbers of the file."""
        return parts.gradient() if self.by_token else by_micro_batch(self.file["micro_batch"], parts.losses())

    def off(self, parts: Parts) -> float:
        """Return how far numbers are from those of the file, relative to the larger of the two."""
        expected, found, error = self.numbers(parts), self.found, self.error
        if len(expected) < len(found):
            found, error = found[self.rows], error[self.rows]
        if found.shape != expected.shape or not expected.isfinite().all():
            return math.inf
        size = max(float(expected.norm()), float(found.norm()), 1e-30) if self.by_token else self.size
        error = error if self.by_token else 1e-6 * expected.abs()  # a large loss has few decimals
        return float(((found - expected).abs() - error).clamp(min=0).norm()) / size

    def near(self, gradient: Tensor) -> Tensor:
        """Return which gradients [B, T] rounding decides, with 16 bits: at ratios near a bound."""
        level, bounds = self.recipe.ratio, (1 - self.recipe.clip_low, 1 + self.recipe.clip_high)
        ratio = recipes.log_ratio(self.file, self.recipe, self.file["logprobs"], level).exp()
        at = sum((ratio - bound).abs() < 2**-7 * bound for bound in bounds)
        return at * torch.maximum(gradient.abs(), self.found.abs())

    def cases(self, recipe: Recipe, table: Iterable[Row], unchanged: bool = False) -> Iterator[_Case]:
        """Yield the mistakes that change the numbers of a recipe; with `unchanged`, also the others."""
        base, own = self.compute(self.file, recipe), self.row["term"]
        for term, text, change in table:
            if (given := recipes.twisted(self.file, recipe, change)) is None:
                continue
            try:
                parts = self.compute(*given)
            except (Missing, RuntimeError, TypeError):  # a tensor is missing or of another kind, or an option
                continue
            pairs = zip(Parts._fields, parts, base, strict=True)
            changed = {name for name, x, y in pairs if not torch.equal(x, y)}
            if changed or unchanged:
                text = text.format(**vars(recipe))
                yield _Case(term if own == "loss" else own, text, given[1], parts, changed)

    def findings(self, own: list[Row]) -> list[Finding]:
        """Return whether the numbers are those of the recipe, or else which mistakes explain them."""
        term = self.row["term"]
        if not any((each.abs() > self.error).any() for each in (self.found, self.numbers(self.base))):
            zero = self.name == "loss" and not self.file["advantages"].any()
            return [Finding(term, "unchecked", f"all {'advantages' if zero else 'numbers'} are 0")]
        if not self.file.header.get("claims"):
            if same := self.identified():
                return [Finding(term, "ok", self.words(self.alike(same)))]
            state = "wrong" if self.name in ("loss", "pairs") else "unchecked"  # rewards may be shaped before
            return [Finding(term, state, f"no known variant gives these numbers: {self.where()}")]
        off = self.off(self.base)
        if off < self.within:
            if text := self.reported(self.base):
                return [Finding(term, "wrong", text)]
            return [Finding(term, "ok", f"{self.words(self.alike([self.recipe]))} (off by {off:.0e})")]
        for case in self.cases(self.recipe, self.free()):
            if self.off(case.parts) < self.within:
                words = f"{self.words(self.alike([case.recipe]))}; not in the settings: {case.text}"
                return [Finding(term, "ok", words)]
        size = f" (off by {100 * off:.3g}%)" if off < 10 else ""
        if found := self.explained(own):
            return [Finding(its, "wrong", f"{text}{size}") for its, text in found]
        said = self.words([self.recipe])
        text = f"no known mistake gives these numbers{size}: {self.where()}; the settings say {said}"
        if same := sorted(self.identified(), key=lambda each: len(self.other_keys(each))):
            text = f"the numbers are those of {self.words(same)}{size}; the settings say {said}"
            keys = self.other_keys(same[0])
            return [Finding(recipes.TERMS[keys[0]] if keys else term, "wrong", text)]
        return [Finding("pairs" if self.name == "pairs" else term, "wrong", text)]

    def other_keys(self, recipe: Recipe) -> list[str]:
        """Return the shown settings in which a recipe differs from the claims."""
        return [key for key in self.row["shown"] if getattr(recipe, key) != getattr(self.recipe, key)]

    def free(self) -> Iterator[Row]:
        """Yield what libraries do differently and claims do not say, so that it is no mistake."""
        if self.name == "loss" and "empty" not in self.file.header["claims"]:
            yield from (("", words, {"empty": key}) for key, words in SETTINGS["empty"][2].items())
        elif self.name == "advantages":
            yield from (("", f"std_eps is {eps}", {"std_eps": eps}) for eps in SETTINGS["std_eps"][2])
            if self.recipe.whiten in ("tokens", "scale"):
                yield from (("", f"std is {each}", {"std": each}) for each in SETTINGS["std"][2])
            if self.recipe.whiten != "none":
                yield "", "the KL of a token counts for this token and those before it", {"to_go": True}

    def alike(self, found: list[Recipe]) -> list[Recipe]:
        """Return recipes, and changes of a setting of the first one that give the same numbers."""
        single = [row for row in recipes.varied(self.name, found[0]) if len(row[2]) == 1]
        cases = self.cases(found[0], single, unchanged=True)
        return found + [case.recipe for case in cases if self.off(case.parts) < self.within]

    def explained(self, own: list[Row]) -> list[tuple[str, str]]:
        """Return terms and words of the mistakes that give the numbers of the file; [] if none does."""
        factor, general = self.factor(self.base)
        if factor and not general:
            return [("reduction", factor)]
        cases = []
        for case in self.cases(self.recipe, [*own, *recipes.rows(self.name, self.recipe)]):
            if self.off(case.parts) < self.within:
                return [(case.term, case.text)]
            cases.append(case)
        if fitted := self.fitted():
            return [("KL" if self.recipe.kl_coef else "teacher", fitted)]
        if factor:
            return [("reduction" if self.size else self.name, factor)]
        for case in cases:
            if isinstance(self.rows, slice) and (factor := self.factor(case.parts)[0]):
                return [(case.term, case.text), ("reduction", factor)]
        for a, b in combinations(cases, 2):
            if not a.changed & b.changed:
                mixed = a.parts._replace(**{name: getattr(b.parts, name) for name in b.changed})
                if self.off(mixed) < self.within:
                    first = a if "policy" in a.changed or "weight" in b.changed else b
                    return [(case.term, case.text) for case in (first, b if first is a else a)]
        if self.name == "advantages" and self.found.shape == (expected := self.numbers(self.base)).shape:
            x, y = (each.sum(1) / self.file.mask.sum(1).clamp(min=1) for each in (self.found, expected))
            if float((x.sort()[0] - y.sort()[0]).norm()) < self.within * float(y.norm()):
                return [("advantages", "they are right, but stand at other rows")]
        apart, _ = self.factor(self.base, apart=True)
        return [("reduction", apart)] if apart else []

    def fitted(self) -> str:
        """Return in words the factor of the penalties that gives the gradient of the file, or ""."""
        penalty = self.numbers(self.base._replace(policy=torch.zeros(2, 1, 1)))
        if not self.by_token or self.name != "loss" or not penalty.any():
            return ""
        rest = self.found - self.numbers(self.base) + penalty
        scale = float((rest * penalty).sum() / penalty.square().sum())
        if float((rest - scale * penalty).norm()) > self.within * float(self.found.norm()):
            return ""
        count, words = int(self.file["micro_batch"].max()) + 1, ""
        if count > 1 and min(abs(scale / count - 1), abs(scale * count - 1)) < 10 * self.within:
            words = f": not divided by the {count} micro-batches, or once more"
        return f"the penalty is {scale:.4g} times as large{words}"

    def factor(self, parts: Parts, apart: bool = False) -> tuple[str, bool]:
        """Return in words the factor between the file and a recipe, and whether it is any number.

        It is the same for all micro-batches, or 0 for those that are lost; with `apart`, each may have
        its own. "" if there is none.
        """
        expected, micro = self.numbers(parts), self.file["micro_batch"] * bool(self.size)
        if not self.by_token or expected.shape != self.found.shape:
            return "", False
        squares, products = (by_micro_batch(micro, expected * x) for x in (expected, self.found))
        factors = (products / squares).nan_to_num()
        kept = factors[(squares > 0) & (factors.abs() > self.within)]
        rest = self.found - factors[micro, None] * expected
        if not len(kept) or not float(rest.norm()) < self.within * float(self.found.norm()):
            return "", False
        if float(kept.max() - kept.min()) > 10 * self.within * float(kept.abs().max()):
            if not apart or 4 * len(factors) > len(micro):  # nearly one for each row
                return "", False
            shown = ", ".join(f"{each:.3g}" for each in factors.tolist())
            return f"the micro-batches are {shown} times as large", True
        value, count = float(kept[0]), len(factors)
        lost = ", ".join(str(part) for part, each in enumerate(factors.tolist()) if abs(each) <= self.within)
        if lost and abs(value - 1) < self.within:
            return f"the micro-batches {lost} of {count} are lost", False
        for usual, words in ((1 / count, "divided once more by"), (float(count), "not divided by")):
            if count > 1 and not lost and abs(value / usual - 1) < self.within:
                return f"the loss is {words} the {count} micro-batches (factor {value:.4g})", False
        what, also = (f"{self.name} are", "") if not self.size else ("loss is", self.meaning(value, count))
        also = f", and the micro-batches {lost} are lost" if lost else also
        return f"the {what} {value:.6g} times as large{also}", True

    def meaning(self, value: float, count: int) -> str:
        """Return in words which number of the batch a factor of the loss is; "" if it is none of them."""
        file, tokens = self.file, int(self.file.mask.sum())
        sizes = {"responses": len(file.mask), "positions of a response": file.mask.shape[1], "tokens": tokens}
        if "group" in file:
            sizes["prompts"] = len(file["group"].unique())
        parts = f"not by the {count} micro-batches"
        known = {f"multiplied by the {size} {words}": float(size) for words, size in sizes.items()}
        known |= {f"divided by the {size} {words}": 1 / max(size, 1) for words, size in sizes.items()}
        longest = int(file.mask.sum(1).max())
        words = f"divided by the longest response ({longest}), not by {self.recipe.max_tokens}"
        known[words] = self.recipe.max_tokens / max(longest, 1)
        if "prompt_mask" in file:
            whole = file["prompt_mask"].shape[1] + file.mask.shape[1]
            words = (
                f"divided by the {whole} positions of prompt and response, not by {self.recipe.max_tokens}"
            )
            known[words] = self.recipe.max_tokens / whole
        known |= {f"divided by {k}, {parts}": count / k for k in range(1, 65) if count > 1}
        near = [words for words, each in known.items() if abs(value - each) < self.within * abs(value)]
        return f": as if {near[0]}" if near else ""

    def reported(self, parts: Parts) -> str:
        """Return in words how the reported losses differ; each may be the mean of its micro-batch."""
        losses = self.file.get(self.row["targets"][-1])
        if not self.file.mask.any(1).all():  # their ratio is 1, so some libraries report their advantages
            return ""
        expected = by_micro_batch(self.file["micro_batch"], parts.losses())
        if not self.size or not self.by_token or losses is None or losses.shape != expected.shape:
            return ""
        limit = max(1e-3, self.within) * self.size + self.within * float(expected.norm())
        if any(float((losses / each - expected).norm()) < limit for each in (1, len(losses))):
            return ""
        shown = f"{losses.sum():.6g}, not {expected.sum():.6g}"
        return f"the gradient is right, but the reported loss is not: {shown}"

    def words(self, found: list[Recipe]) -> str:
        """Return settings in words, and those that differ between the recipes as not determined."""
        first, shown, unknown, hidden = found[0], [], [], set()
        for settings, keys in self.row.get("hidden", []):
            if all(getattr(first, key) in values for key, values in settings.items()):
                hidden |= {*keys}
        for key in self.row["shown"]:
            values = list(dict.fromkeys(str(getattr(each, key)) for each in found))
            if key in hidden:
                continue
            if len(values) > 1:
                unknown.append(f"{key} ({', '.join(values)})")
            elif getattr(first, key) not in (None, {}):
                shown.append(f"{key} {values[0]}")
        return ", ".join(shown) + (f"; this batch does not determine {', '.join(unknown)}" if unknown else "")

    def where(self) -> str:
        """Return where the numbers first differ from the recipe's."""
        if not self.by_token:
            return "add logprob_grads to the file to see where"
        gap = (self.found - self.numbers(self.base)).abs()
        differ = gap > self.within * gap.max()
        places = differ.nonzero()
        row, column = places[0].tolist() if len(places) else (0, 0)
        count = len(places[:, 0].unique())
        text = f"{len(places)} tokens of {count} responses differ, the first at row {row}, position {column}"
        kinds = self.kinds() if self.name == "loss" and differ.shape == self.file.mask.shape else {}
        held = [(int(at.sum()), words) for words, at in kinds.items() if not (differ & ~at).any()]
        return f"{text}; all are {min(held)[1]}" if held else text

    def kinds(self) -> dict[str, Tensor]:
        """Return sets of tokens [B, T] to which differences may be limited, by words."""
        file, recipe, mask = self.file, self.recipe, self.file.mask
        ratio = recipes.log_ratio(file, recipe, file["logprobs"], recipe.ratio).exp().expand(mask.shape)
        a = file["advantages"].view(len(mask), -1).expand(mask.shape)
        place, last = mask.cumsum(1), mask.sum(1, keepdim=True)
        kinds = {"outside of the mask": ~mask, "at the first token": (place == 1) & mask}
        kinds |= {"at the last token": (place == last) & mask, "at negative advantages": (a < 0) & mask}
        kinds["at positive advantages"] = (a > 0) & mask
        bounded = ratio.clamp(1 - recipe.clip_low, 1 + recipe.clip_high)
        kinds["at ratios outside of the bounds"] = (ratio != bounded) & mask
        at = file["micro_batch"][:, None]
        return kinds | {f"in micro-batch {i}": mask & (at == i) for i in at.unique().tolist() if at.any()}

    # -- without claims

    def identified(self) -> list[Recipe]:
        """Return the recipes that give the numbers of the file."""
        tried: Iterable[Recipe] = self.losses()
        if self.name != "loss":
            bases = self.shaped() if self.name == "advantages" else [self.recipe]
            changes = ((base, change) for base in bases for *_, change in recipes.varied(self.name, base))
            tried = [*bases, *(base.changed(**change) for base, change in changes)]
        near: list[tuple[Recipe, str]] = []
        for each in tried:
            with suppress(Missing):
                if self.off(parts := recipes.parts(self.name, self.file, each)) < self.within:
                    near.append((each, self.reported(parts)))
        return [each for each, wrong in near if not wrong] or [each for each, _ in near]

    def shaped(self) -> list[Recipe]:
        """Return recipes without and with a KL penalty in the rewards, whose coefficient is fitted."""
        plain = self.recipe.changed(scale="none", kl_coef=0.0, kl_in="reward")
        found = [plain]
        for kl in ("k1", "k2", "k3") if "ref_logprobs" in self.file and "all_rewards" in self.file else ():
            given = plain.changed(kl_coef=1.0, kl=kl)
            a, b = (self.numbers(self.compute(self.file, each)).flatten() for each in (plain, given))
            fit = torch.linalg.lstsq(torch.stack([a, b - a], 1), self.found.flatten())
            scale, coef = fit.solution.tolist()
            if abs(coef) > self.within * abs(scale):
                found.append(given.changed(kl_coef=float(f"{coef / scale:.4g}")))
        return found

    def losses(self) -> Iterator[Recipe]:
        """Yield recipes with nearly the gradient of the file: weight x (policy term + coefficient x KL)."""
        none = self.recipe.changed(kl_coef=0.0, kl_in="loss")
        known = product(("k3", "k1", "k2"), (False, True)) if "ref_logprobs" in self.file else ()
        kls: list[dict[str, Any]] = [{"kl": kl, "kl_times_ratio": by, "kl_coef": 1.0} for kl, by in known]
        found, zero = self.found[self.rows], torch.zeros(2, 1, 1)
        size = self.within * float(found.norm())
        for level in SETTINGS["ratio"][2]:
            base, bounds = none.changed(ratio=level), [*TABLE["clips"], *self.bounds(level)]
            kinds: list[dict[str, Any]] = [{}, {"surrogate": "cispo"}, {"dual_clip": 3.0}]
            tried = [base.changed(clip_low=a, clip_high=b, **kind) for (a, b), kind in product(bounds, kinds)]
            tried += [base.changed(surrogate="reinforce")] * (level == "one")
            policies = [(each, self.compute(self.file, each).policy) for each in tried]
            penalties = [self.compute(self.file, base.changed(**kl)).penalty for kl in ({}, *kls)]
            for reduction, over in product(SETTINGS["reduction"][2], SETTINGS["over"][2]):
                shape = {"reduction": reduction, "over": over}
                try:
                    weight = recipes.weights(self.file, self.recipe.changed(**shape))[self.rows]
                except Missing:
                    continue
                parts = [self.numbers(Parts(zero, penalty, weight)) for penalty in penalties]
                for each, policy in policies:
                    gap = found - self.numbers(Parts(policy, zero, weight))
                    for kl, part in zip(({}, *kls), parts, strict=True):
                        coef = float((gap * part).sum() / part.square().sum().clamp(min=1e-30))  # fits best
                        rest, missing = gap - coef * part, kl and abs(coef) * float(part.norm()) < size
                        limit = size if self.by_token else self.within * self.size
                        if not missing and float(rest.norm()) < limit:
                            yield each.changed(**shape, **{**kl, "kl_coef": float(f"{coef:.4g}")})

    def bounds(self, level: str) -> list[tuple[float, float]]:
        """Return clip_low and clip_high between ratios with and without a gradient, if the loss has no KL."""
        mask, file = self.file.mask, self.file
        u = recipes.log_ratio(file, self.recipe, file["logprobs"], level).exp().expand(mask.shape)[mask]
        a = file["advantages"].view(len(mask), -1).expand(mask.shape)[mask]
        gradient = self.found[mask] if self.by_token else a
        clipped, beyond, found = (gradient == 0) & (a != 0), (u - 1) * a.sign(), []
        if not clipped.any() or (clipped & (beyond <= 0)).any():
            return []
        for sign, none in ((-1, 1.0), (1, 1e9)):
            side = (a.sign() == sign) & (beyond > 0)
            cut, free = beyond[side & clipped].tolist(), beyond[side & ~clipped].tolist()
            found.append(float(f"{(min(cut) + max(free, default=0.0)) / 2:.2g}") if cut else none)
        return [(found[0], found[1])]


# -- mask, log-probs and norms ---------------------------------------------------------------------------


def _mask(file: BatchFile) -> Finding:
    """Compare the mask with the token ids: prompt, padding, end token, first token, gaps."""
    mask, none = file.mask, torch.zeros_like(file.mask)
    messages, prompt = file.get("environment_mask", none), file.get("prompt_positions", none)
    real, unclear, last = ~messages & ~prompt, none, none
    known = "response_ids" in file and bool(file.header.get("eos_ids"))
    if known:
        ids = file["response_ids"]
        is_end = torch.isin(ids, torch.tensor(file.header["eos_ids"]))
        padding: Tensor = ids == torch.tensor(file.header.get("pad_id", -1))
        before = is_end.long().cumsum(-1) - is_end.long()  # end tokens before this one
        trailing = padding.flip(-1).long().cumprod(-1).flip(-1).bool()
        last = is_end & (before == 0)
        unclear = trailing & (before == 0) & ~is_end  # padding, or sampled before the length limit
        if not (padding & ~trailing).any():  # never sampled, so a long run of it is not, either
            real = real & ~(unclear & (unclear.sum(1, keepdim=True) >= 8))
        real = real & (~trailing | last if messages.any() else before == 0)
        trained, short = (mask & last).any(), mask.sum(1) < mask.sum(1).max()
        if (is_end & padding).any() and (trained or float(short.double().mean()) < 0.5):
            unclear = unclear | (trailing & ~mask)  # an end token, or padding after a cut response
    wrong, missing = mask & ~real, real & ~mask & ~unclear & mask.any(-1, keepdim=True) & known
    ends, starts = (missing & ~(missing & ~at).any() for at in (last, (real.cumsum(-1) == 1) & real))
    kinds = {"includes the prompt": wrong & prompt, "includes tokens of the environment": wrong & messages}
    kinds |= {"includes padding after the end token": wrong & ~prompt & ~messages}
    kinds |= {"excludes the end token": ends, "excludes the first token": starts & ~ends}
    kinds |= {"excludes tokens": missing & ~ends & ~starts}
    if found := [(words, at) for words, at in kinds.items() if at.any()]:
        sizes = [
            f"{words}: {int(at.sum())} tokens of {int(at.any(-1).sum())} responses" for words, at in found
        ]
        return Finding("mask", "wrong", f"it {', and '.join(sizes)}")
    if not known:
        return Finding("mask", "unchecked", "the file has no response_ids, or no eos_ids in the header")
    return Finding("mask", "ok", f"{int(mask.sum())} tokens of {len(mask)} responses")


def _logprobs(file: BatchFile) -> Iterator[Finding]:
    """Compare log-probs with one another: positions and rows, temperature, another policy."""
    known = ("old_logprobs", "behaviour_logprobs", "ref_logprobs", "teacher_logprobs")
    names, now = [name for name in known if name in file], file["logprobs"][file.mask]
    few = len(now) < 30 or float(now.std()) < 1e-6
    if few or not names:
        why = "fewer than 30 tokens, or equal log-probs" if few else "the file has no other log-probs"
        yield Finding("log-probs", "unchecked", why)
        return
    found = [Finding(name, "wrong", text) for name in names if (text := _unlike(file, name))]
    if "weights" in file and {"old_logprobs", "behaviour_logprobs"} <= {*names}:
        at = file.mask & (file["weights"] > 0)
        gap = (file["old_logprobs"] - file["behaviour_logprobs"])[at]
        if len(gap) >= 30 and _correlation(gap, file["weights"][at].log()) < -0.5:
            words = "the weights are inverted: they are larger where the sampler is, not the trainer"
            found.append(Finding("correction", "wrong", words))
    fit = Finding("log-probs", "ok", "positions and temperature of all log-probs fit one another")
    yield from found or [fit]


def _unlike(file: BatchFile, name: str) -> str:
    """Return in words how log-probs do not fit those of the policy; "" if they do."""
    mask, now, other, fits = file.mask, file["logprobs"], file[name], {}
    for move in ("", ">>0", "<<0"):
        both = mask & moved(file, mask, move)
        fits[move] = _correlation(now[both], moved(file, other, move)[both])
    best = max(fits, key=lambda move: fits[move])
    step, since = (file.header.get(key) for key in ("step", "updates_since_old"))
    gap = (now - other)[mask]

    def same(known: str) -> bool:
        return known in file and torch.equal(file[known][mask], other[mask])

    if positive := int((other[mask] > 1e-6).sum()):
        return f"{positive} values are above 0"
    if best and fits[best] > max(0.5, fits[""] + 0.2):
        side = {">": "left", "<": "right"}[best[0]]
        fit = f"correlation with logprobs {fits[best]:.2f}, as they are {fits['']:.2f}"
        return f"shifted by one position to the {side}: {fit}"
    if share := _of_other_rows(mask, now, other):
        return f"those of other rows: {share:.0%} of the rows are like another row, and not like their own"
    trained = isinstance(step, int) and step > (since or 0) + 1  # before the old log-probs were computed
    if name == "ref_logprobs" and trained and same("old_logprobs"):
        return "those of the trainer before the update"
    if name == "old_logprobs" and since == 0 and float(gap.abs().mean()) > 50 * file.header["within"]:
        if same("behaviour_logprobs"):
            return "those of the sampler, not of the trainer before the update"
        return f"stale: no update since, but they differ from logprobs by {gap.abs().mean():.3g} on average"
    if name == "old_logprobs" and since and float(gap.abs().max()) < 1e-6:
        return f"those of the current policy: {since} updates were made since, but every ratio is 1"
    mean, error = (x := gap.exp()).mean(), x.std() / len(x) ** 0.5
    above = float((gap < 0.01).double().mean()) > 0.85 or -float(gap.mean()) > 5 * float(gap.var())
    if name == "behaviour_logprobs" and -float(gap.mean()) > 0.05 and above:
        cause = "of fewer tokens (top-p, top-k)" if fits[""] > 0.5 else "of other, more probable tokens"
        return f"{-gap.mean():.3g} above the trainer's on average, as if {cause}"
    if name == "behaviour_logprobs" and float(mean) > 1.5 and float(mean - 1) > 10 * float(error):
        words = f"the mean ratio of trainer to sampler is {mean:.3g}, but about 1 or less for sampled tokens"
        return f"not the log-probs with which the tokens were sampled: {words}"
    hot = Recipe.of(file).temperature != 1
    if name in ("behaviour_logprobs", "old_logprobs") or (hot and name == "ref_logprobs"):
        trainer = file.get("old_logprobs", now)[mask] if name[0] == "b" else now[mask]
        gap = trainer - other[mask]
        tilt = _correlation(gap, trainer), _correlation(gap, other[mask])
        if min(map(abs, tilt)) > (0.5 if hot else 0.7) and tilt[0] * tilt[1] > 0 and float(gap.std()) > 0.02:
            spread = f"correlation {tilt[0]:.2f}; deviations {trainer.std():.3g} and {other[mask].std():.3g}"
            return f"another temperature than the trainer's: the difference follows the log-prob ({spread})"
    return ""


def _of_other_rows(mask: Tensor, x: Tensor, y: Tensor) -> float:
    """Return the share of the rows of `x` [B, T] that are like another row of `y`; 0 if it is small."""
    mask, x, y = (each[mask.sum(1) >= 10].double() for each in (mask, x, selected(y, mask)))
    count = mask.sum(1, keepdim=True)
    x = (x - (x * mask).sum(1, keepdim=True) / count) * mask
    # of each row of y over the mask of a row of x
    spread = mask @ y.square().T - (mask @ y.T).square() / count
    likeness = (x @ y.T) / (x.norm(dim=1, keepdim=True) * spread.clamp(min=0).sqrt()).clamp(min=1e-12)
    other = (likeness.amax(1) > 0.8) & (likeness.diagonal() < 0.5) if len(x) else x[:, :0].sum(1) > 0
    share = float(other.double().mean().nan_to_num())
    return share if share > 0.2 else 0.0


def _correlation(x: Tensor, y: Tensor) -> float:
    """Return Pearson's correlation of two vectors; 0 if one is constant."""
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1].nan_to_num()) if len(x) > 1 else 0.0


def _norms(file: BatchFile) -> Iterator[Finding]:
    """Compare gradient norms of the same step with other numbers of micro-batches."""
    norms = file.header.get("grad_norms", {})
    if len(norms) > 1:
        same = max(norms.values()) < min(norms.values()) * (1 + max(1e-3, file.header["within"]))
        how = "does not depend" if same else "depends (gradients are lost or divided wrongly)"
        shown = ", ".join(f"{count}: {norms[count]:.6g}" for count in sorted(norms))
        text = f"the norm {how} on the number of micro-batches: {shown}"
        yield Finding("gradient", "ok" if same else "wrong", text)


# -- the weights that were trained -----------------------------------------------------------------------


_CLOSE = {"float32": 1e-3, "float16": 0.02}  # mean difference of log-probs; other dtypes: 0.1


def weights(file: BatchFile, folder: Path) -> Iterator[Finding]:
    """Yield the findings `weights` and `gradient`, given the folder with the weights before the step.

    Raises:
        UserError: the folder has no such model, or the file has no token ids.
    """
    from rlhf.models.loading import load_causal_lm

    if lacking := [name for name in ("prompt_ids", "prompt_mask", "response_ids") if name not in file]:
        raise UserError(f"--model needs token ids, but {file.path} has no {', '.join(lacking)}")
    if not folder.is_dir():
        raise UserError(f"--model must be a folder with a causal language model, got {folder}")
    model = load_causal_lm(str(folder), key="--model")
    if max(int(file[name].max()) for name in ("prompt_ids", "response_ids")) >= model.config.vocab_size:
        raise UserError(f"{folder} must have the tokens of the file, got {model.config.vocab_size} tokens")
    tau = Recipe.of(file).temperature
    inverse = "the logits are multiplied by the temperature"
    guesses = {1 / tau: inverse, 1.0: "the temperature is missing", tau: ""}
    gaps, grads = dict.fromkeys(guesses, 0.0), []
    for part in range(int(file["micro_batch"].max()) + 1):
        some = file.rows((file["micro_batch"] == part).nonzero()[:, 0])
        logits = _logits(model, some)
        for guess in gaps:
            gap = _chosen(logits.detach(), some["response_ids"], guess) - some["logprobs"]
            gaps[guess] += float(selected(gap.abs(), some.mask).sum()) / max(int(file.mask.sum()), 1)
        if "logprob_grads" in file:
            loss = _chosen(logits, some["response_ids"], tau) * selected(some["logprob_grads"], some.mask)
            model.zero_grad()
            loss.sum().backward()
            grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    limit = _CLOSE.get(file.header.get("dtype", "float32"), 0.1)
    best = min(gaps, key=lambda guess: gaps[guess])
    if gaps[tau] < limit:
        yield Finding("weights", "ok", f"logprobs are those of {folder.name} (off by {gaps[tau]:.1g})")
        if grads and (reported := file.header.get("grad_norm")):
            yield _gradient(reported, torch.stack(grads), max(1e-3, file.header["within"]))
    else:
        why = f": {guesses[best]} (claimed: {tau})" if gaps[best] < limit else ""
        text = f"logprobs are not those of {folder.name} (off by {gaps[tau]:.2g} a token){why}"
        yield Finding("weights", "wrong", text)


def _gradient(reported: float, grads: Tensor, within: float) -> Finding:
    """Return the finding of a norm, given the gradients of the micro-batches [M, parameters]."""
    count, norm = len(grads), float(grads.sum(0).norm())
    known = {f"only micro-batch {part} of {count} arrived": float(x.norm()) for part, x in enumerate(grads)}
    known |= {f"divided once more by the {count} micro-batches": norm / count}
    known |= {f"not divided by the {count} micro-batches": norm * count}
    if abs(norm / reported - 1) < within:
        return Finding("gradient", "ok", f"norm {reported:.6g} (off by {abs(norm / reported - 1):.0e})")
    close = [words for words, each in known.items() if abs(each / reported - 1) < within]
    why = close[0] if close else "between autograd and the optimizer the gradient changed"
    return Finding("gradient", "wrong", f"{why}: the norm is {reported:.6g}, not {norm:.6g}")


def _logits(model: Any, file: BatchFile) -> Tensor:
    """Return the logits [B, T, V] at the response positions."""
    prompt, response = file["prompt_ids"], file["response_ids"]
    ends = torch.isin(response, torch.tensor(file.header.get("eos_ids") or [-1])).long()
    mask = torch.cat([file["prompt_mask"], (ends.cumsum(-1) - ends) == 0], 1).long()
    ids, places = torch.cat([prompt, response], 1), (mask.cumsum(-1) - 1).clamp(min=0)
    logits: Tensor = model(input_ids=ids, attention_mask=mask, position_ids=places).logits
    return logits[:, prompt.shape[1] - 1 : -1].double()


def _chosen(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Return the log-probs [B, T] of tokens."""
    return (logits / temperature).log_softmax(-1).gather(2, ids[..., None])[..., 0]
