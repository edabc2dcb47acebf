"""Dump optimizer steps of any trainer whose loss is a function of log-probs, for `rlhf audit`.

    cp docs/hooks/generic.py audit_hook.py

    from audit_hook import OPENRLHF, Dump, claims
    dump = Dump(OPENRLHF)                                       # before training
    PolicyLoss.forward = dump.wrap(PolicyLoss.forward)
    ...
    dump.finish("step-3.safetensors", claims(loss, ...), rewards=..., group=...)    # after backward of step 3

    rlhf audit step-3.safetensors

The file needs torch and safetensors, not rlhf. Format of the dump: docs/reference/batch_file.md.

| framework       | function                                           | names      |
|-----------------|----------------------------------------------------|------------|
| OpenRLHF 0.11   | `PolicyLoss.forward` in openrlhf/models/loss.py    | `OPENRLHF` |
| prime-rl        | `compute_loss` in prime_rl/trainer/rl/train.py     | `PRIME_RL` |
| others          | the function that gets log-probs, mask, advantages | your own   |

Run: PolicyLoss and compute_approx_kl of OpenRLHF 0.11.2; a function with the signature of prime-rl (lists of
sequences). Read, not run: trainers of both.
"""

import functools
import inspect
import json

import torch
from safetensors.torch import save_file
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

# argument of the loss function -> tensor of the file
OPENRLHF = {
    "log_probs": "logprobs",
    "old_log_probs": "old_logprobs",
    "advantages": "advantages",
    "action_mask": "response_mask",
    "rollout_log_probs": "behaviour_logprobs",
}
PRIME_RL = {
    "trainer_logprobs": "logprobs",
    "inference_logprobs": "old_logprobs",
    "advantages": "advantages",
    "loss_mask": "response_mask",
}

# algo.advantage.estimator of OpenRLHF, as far as rewards of responses determine the advantages
ESTIMATORS = {
    "rloo": {"advantage": "leave_one_out", "scale": "none"},
    "dr_grpo": {"advantage": "mean", "scale": "none"},
    "group_norm": {"advantage": "mean", "scale": "group", "std": "unbiased", "std_eps": 1e-9},
}


def claims(loss, estimator=None, kl_coef=0.0, kl="k1", unbiased=False, temperature=1.0):
    """Return what OpenRLHF's PolicyLoss and the settings beside it say, in the words of `rlhf audit`.

    Args:
        loss: the PolicyLoss of the actor.
        estimator: `algo.advantage.estimator`; None: the advantages are not checked.
        kl_coef: `algo.kl.init_coef` if `algo.kl.use_loss` is set, else 0.
        kl: `algo.kl.estimator`.
        unbiased: `algo.kl.unbiased_gradient`.
        temperature: that of the sampler.

    Raises:
        ValueError: `rlhf audit` has no words for a setting.
    """
    unknown = ["is_correction_level"] if loss.is_correction_level != "off" else []
    unknown += ["unbiased_gradient"] if unbiased and kl_coef else []
    if unknown:
        raise ValueError(f"rlhf audit has no words for {', '.join(unknown)}")
    return {
        **ESTIMATORS.get(estimator, {"advantage": "given"}),
        "ratio": {"ppo": "token", "gspo": "sequence_mean"}[loss.policy_loss_type],
        "surrogate": "clip",
        "clip_low": loss.clip_eps_low,
        "clip_high": loss.clip_eps_high,
        "dual_clip": loss.dual_clip,
        "kl_coef": kl_coef,
        "kl": kl,
        "reduction": "token" if loss.token_level_loss else "sequence",
        "over": "step",
        "temperature": temperature,
    }


class Dump:
    """The micro-batches of an optimizer step.

    Args:
        names: arguments of the loss function, and the tensors of the file that they are. An argument is a
            tensor [rows, tokens], or a list of tensors [tokens], which are padded.
    """

    def __init__(self, names):
        if not {"logprobs", "response_mask"} <= set(names.values()):
            raise ValueError(f"names must have logprobs and response_mask, got {sorted(names.values())}")
        self.names, self.parts = names, []

    def wrap(self, function):
        """Return the loss function with a note of each call.

        Raises:
            TypeError: the function has no argument of one of the names.
        """
        signature = inspect.signature(function)
        if missing := self.names.keys() - signature.parameters.keys():
            raise TypeError(f"{function.__qualname__} has no argument {', '.join(sorted(missing))}")

        @functools.wraps(function)
        def noted(*args, **kwargs):
            if not torch.is_grad_enabled():
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            part = {}
            for argument, name in self.names.items():
                if given.get(argument) is not None:
                    self._note(part, name, given[argument])
            result = function(*args, **kwargs)
            loss = result[0] if isinstance(result, (list, tuple)) else result
            self.parts.append(part | {"losses": loss.detach().reshape(1)})
            return result

        return noted

    def note(self, **tensors):
        """Add tensors to the last micro-batch: `ref_logprobs`, if the trainer adds the KL to the loss."""
        self.parts[-1] |= {name: x.detach() for name, x in tensors.items()}
        self.parts[-1].pop("losses", None)  # the trainer's loss has further terms

    def _note(self, part, name, x):
        """Note an argument, and the gradient of log-probs."""
        rows = list(x) if isinstance(x, (list, tuple)) else [x]
        part[name] = x.detach() if torch.is_tensor(x) else pad_sequence([row.detach() for row in rows], True)
        if name != "logprobs":
            return
        grads = part["logprob_grads"] = torch.full_like(part[name], torch.nan)
        places = [grads] if torch.is_tensor(x) else [grads[i, : len(row)] for i, row in enumerate(rows)]
        for row, place in zip(rows, places, strict=True):
            row.register_hook(place.copy_)

    def finish(self, path, claims=None, *, later=1.0, header=(), **tensors):
        """Write the file of the optimizer step, and begin the next.

        Args:
            path: of the file.
            claims: what the settings say; None: `rlhf audit` identifies the variant.
            later: factor that the backend applies to gradients after autograd, such as 1 / the accumulation
                steps with DeepSpeed.
            header: further keys, such as `framework`, `version`, `step`, `grad_norm`, `pad_id`, `eos_ids`.
            tensors: of the whole step, such as `rewards` and `group`, in the order of the rows.

        Raises:
            RuntimeError: the loss function was not called, or its log-probs got no gradient.
        """
        if not self.parts:
            raise RuntimeError("the loss function was not called since the last step")
        width = max(part["logprobs"].shape[1] for part in self.parts)
        whole = {}
        for name in self.parts[0]:
            found = [part[name] for part in self.parts]
            found = [pad(x, (0, width - x.shape[1])) if x.dim() == 2 else x for x in found]
            whole[name] = torch.cat(found).contiguous().cpu()
        mask = whole["response_mask"] = whole["response_mask"].to(torch.uint8)
        if whole["logprob_grads"][mask.bool()].isnan().any():
            raise RuntimeError(
                "log-probs of the loss function got no gradient: call finish() after backward()"
            )
        whole["logprob_grads"] = whole["logprob_grads"].nan_to_num(0.0) * later
        places = [torch.full((len(part["logprobs"]),), i) for i, part in enumerate(self.parts)]
        head = {"schema": 1, "kind": "policy_gradient", **dict(header)}
        head |= {} if claims is None else {"claims": claims}
        given = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        save_file(whole | {"micro_batch": torch.cat(places)} | given, path, {"rlhf": json.dumps(head)})
        self.parts = []
