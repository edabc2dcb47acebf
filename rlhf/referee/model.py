"""Check a batch file against the weights that were trained: log-probs and the norm of the gradient."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.core.errors import UserError
from rlhf.core.metrics import selected
from rlhf.referee.audit import Finding
from rlhf.referee.file import BatchFile

_CLOSE = {"float32": 1e-3, "float16": 0.02}  # mean difference of log-probs; other dtypes: 0.1


def weights(file: BatchFile, folder: Path) -> Iterator[Finding]:
    """Yield the findings `weights` and `gradient`, given the folder with the weights before the step.

    Raises:
        UserError: the folder has no model, or the file has not the token ids.
    """
    from transformers import AutoModelForCausalLM

    if lacking := [name for name in ("prompt_ids", "prompt_mask", "response_ids") if name not in file]:
        raise UserError(f"--model needs the token ids, but the file has no {', '.join(lacking)}")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
    except (OSError, ValueError) as error:
        raise UserError(
            f"--model must be a folder with a causal language model, got {folder}: {error}"
        ) from None
    if max(int(file[name].max()) for name in ("prompt_ids", "response_ids")) >= model.config.vocab_size:
        raise UserError(
            f"--model must have the vocabulary of the file, got {model.config.vocab_size} tokens in {folder}"
        )
    tau = file.header.get("claims", {}).get("temperature", 1.0)
    guesses = {tau: "", 1.0: f"the temperature is missing (1 in place of {tau})"}
    guesses = {1 / tau: "the logits are multiplied by the temperature", **guesses, tau: ""}
    gaps, norms = dict.fromkeys(guesses, 0.0), []
    total: list[Tensor] = []
    for part in range(int(file["micro_batch"].max()) + 1):
        rows = (file["micro_batch"] == part).nonzero()[:, 0]
        logits, some = _logits(model, file.rows(rows)), file.rows(rows)
        for guess in guesses:
            found = _chosen(logits.detach(), some["response_ids"], guess)
            gaps[guess] += float(selected((found - some["logprobs"]).abs(), some.mask).sum())
        if "logprob_grads" in file:
            out = (_chosen(logits, some["response_ids"], tau) * some["logprob_grads"].nan_to_num()).sum()
            grads = torch.autograd.grad(
                out, list(model.parameters()), materialize_grads=True, allow_unused=True
            )
            norms.append(_norm(grads))
            total = [a + b for a, b in zip(total, grads, strict=True)] if total else list(grads)
    tokens = max(int(file.mask.sum()), 1)
    limit = _CLOSE.get(file.header.get("dtype", "float32"), 0.1)
    best = min(gaps, key=lambda guess: gaps[guess])
    off = gaps[tau] / tokens
    if off > limit:
        why = f": {guesses[best]}" if gaps[best] / tokens < limit else ""
        yield Finding(
            "weights", "wrong", f"logprobs are not those of {folder.name} (off by {off:.2g} a token){why}"
        )
        return
    yield Finding("weights", "ok", f"logprobs are those of {folder.name} (off by {off:.1g})")
    if total and (reported := file.header.get("grad_norm")):
        yield _gradient(reported, _norm(total), norms, max(1e-3, file.header["within"]))


def _gradient(reported: float, norm: float, parts: list[float], within: float) -> Finding:
    """Return the finding of a gradient norm, given the norms of the sum and of each micro-batch."""
    count = len(parts)
    if abs(norm / reported - 1) < within:
        return Finding("gradient", "ok", f"norm {reported:.6g} (off by {abs(norm / reported - 1):.0e})")
    known = {
        f"only micro-batch {part} of {count} arrived": each for part, each in enumerate(parts) if count > 1
    }
    known |= {f"divided once more by the {count} micro-batches": norm / count}
    known |= {f"not divided by the {count} micro-batches": norm * count}
    close = [words for words, each in known.items() if abs(each / reported - 1) < within]
    why = [*close, "between autograd and the optimizer the gradient changed"][0]
    return Finding("gradient", "wrong", f"{why}: the norm is {reported:.6g}, not {norm:.6g}")


def _norm(grads: Any) -> float:
    return float(sum(each.double().square().sum() for each in grads)) ** 0.5


def _logits(model: Any, file: BatchFile) -> Tensor:
    """Return the logits [B, T, V] at the response positions."""
    prompt, response = file["prompt_ids"], file["response_ids"]
    ends = torch.isin(response, torch.tensor(file.header.get("eos_ids") or [-1])).long()
    mask = torch.cat([file["prompt_mask"], (ends.cumsum(-1) - ends) == 0], 1).long()
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    whole = model(input_ids=torch.cat([prompt, response], 1), attention_mask=mask, position_ids=places)
    logits: Tensor = whole.logits[:, prompt.shape[1] - 1 : -1].double()
    return logits


def _chosen(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Return the log-probs [B, T] of tokens."""
    return (logits / temperature).log_softmax(-1).gather(2, ids[..., None])[..., 0]
