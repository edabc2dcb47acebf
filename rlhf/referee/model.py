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
from rlhf.referee.recipe import Recipe

_CLOSE = {"float32": 1e-3, "float16": 0.02}  # mean difference of log-probs; other dtypes: 0.1


def weights(file: BatchFile, folder: Path) -> Iterator[Finding]:
    """Yield the findings `weights` and `gradient`, given the folder with the weights before the step.

    Raises:
        UserError: the folder has no such model, or the file has no token ids.
    """
    from transformers import AutoModelForCausalLM

    if lacking := [name for name in ("prompt_ids", "prompt_mask", "response_ids") if name not in file]:
        raise UserError(f"--model needs token ids, but {file.path} has no {', '.join(lacking)}")
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"--model must be a folder with a causal language model, got {error}") from None
    if max(int(file[name].max()) for name in ("prompt_ids", "response_ids")) >= model.config.vocab_size:
        raise UserError(f"{folder} must have the tokens of the file, got {model.config.vocab_size} tokens")
    tau = Recipe.of(file).temperature
    inverse = "the logits are multiplied by the temperature"
    guesses = {1 / tau: inverse, 1.0: "the temperature is missing", tau: ""}
    gaps, grads = dict.fromkeys(guesses, 0.0), []
    for part in range(int(file["micro_batch"].max()) + 1):
        some = file.rows((file["micro_batch"] == part).nonzero()[:, 0])
        logits = _logits(model.eval(), some)
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
