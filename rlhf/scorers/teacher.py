"""A teacher that a server of vLLM runs: it reads prompts and responses as token ids, and sends log-probs.

Each response is a request to the route /v1/completions, with the ids of prompt and response as the prompt.
`prompt_logprobs=c` asks for the log-prob of each of these tokens, and those of the c most probable tokens in
its place. All of them ignore the temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.config.algorithms import DistillConfig, TeacherDivergence
from rlhf.core.batch import Batch, Outputs, Rollouts
from rlhf.core.metrics import selected
from rlhf.models.modules import Policy
from rlhf.scorers.http import HttpClient


class ServedTeacher(HttpClient):
    """A frozen policy whose log-probs a server sends, at temperature 1. Every rank asks for its part.

    Args:
        config: config section of the algorithm.
        model: the name of the model on the server.
        tokenizer: the tokenizer of the policy.

    Raises:
        UserError: the environment variable with the key is not set.
    """

    def __init__(self, config: DistillConfig, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__("algo.teacher", config.teacher, f"{config.teacher.url}/v1/completions")
        self.model, self.tokenizer, self.ids = model, tokenizer, {*tokenizer.get_vocab().values()}
        # The number of candidates.
        self.top = min(config.top or 0, len(self.ids)) if config.divergence is TeacherDivergence.exact else 0
        more = f"run: vllm serve {model} --max-logprobs {self.top}, or correct what it refuses"
        self.remedies = {400: more} if self.top else {}
        self.expected = f"it must be vLLM with the model {model} and the tokenizer of the policy; correct it"

    def at(self, temperature: float) -> ServedTeacher:
        """Return this teacher, whose temperature is 1."""
        return self

    def __call__(self, batch: Rollouts) -> Outputs:
        """Return the log-probs [N, K, T] of the responses, and the candidates.

        Raises:
            RunError: the server cannot be reached, refuses a request, or does not answer as it must.
            Interrupted: a signal was received.
        """
        home, batch = batch.response_ids.device, batch.to(torch.device("cpu"))
        flat = (x.flatten(0, 1) for x in (batch.response_ids, batch.real))
        prompts, responses = batch.unpadded(), [ids[real].tolist() for ids, real in zip(*flat, strict=True)]

        def ask(i: int, deadline: float) -> Tensor:
            return self.ask(prompts[i * len(prompts) // len(responses)], responses[i], deadline)

        found = torch.zeros(*batch.real.shape, 1 + 2 * self.top)
        found[batch.real] = torch.cat(self.all(ask, len(responses))).view(-1, found.shape[-1])
        found = selected(found, batch.response_mask[..., None]).to(home)
        return Outputs(logprobs=found[..., 0], candidates=found)

    def ask(self, prompt: list[int], response: list[int], deadline: float) -> Tensor:
        """Return what `read` returns of each token of a response, [T, 1 + 2C] float32, in one try.

        Raises:
            Again: the try may be repeated.
            RunError: the server refuses the request, or does not answer as it must.
        """
        ids = [*prompt, *response]
        question = {"model": self.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": self.top}
        content, problem = self.post(question, self.expected, len(ids) * (1 + self.top), deadline)
        with suppress(AttributeError, LookupError, TypeError, ValueError):  # of an answer in another form
            entries = content["choices"][0]["prompt_logprobs"]
            problem = f"log-probs of {len(entries)} tokens for {len(ids)}"
            if len(entries) == len(ids):
                return torch.tensor([*map(self.read, entries[len(prompt) :], response)])
        raise self.error(f"answered with status 200 and {problem}", self.expected)

    def read(self, entry: dict[str, dict[str, Any]], token: int) -> list[float]:
        """Return the log-prob of a token; then log-prob and id of each candidate in turn.

        A candidate that the policy's tokenizer lacks has the log-prob -inf and the id 0.

        Raises:
            RunError: one is missing or no number, or the server has another text for the token.
        """
        own, text = str(self.tokenizer.decode([token])), str(entry.get(str(token), {}).get("decoded_token"))
        # The token that is there has an entry, too: with a higher rank, if it is no candidate.
        chosen = [each for each in entry if 1 <= entry[each].get("rank", 0) <= self.top]
        logprobs: list[Any] = [entry.get(each, {}).get("logprob") for each in (str(token), *chosen)]
        # Texts of a part of a character (U+FFFD) depend on the tokens before; white space is not always kept.
        same = len(chosen) == self.top and ("\ufffd" in own or text.strip() == own.strip())
        # -9999: NaN or -inf in vLLM
        if same and all(isinstance(each, float | int) and -9999 < each < 1e-3 for each in logprobs):
            pairs = zip(logprobs[1:], map(int, chosen), strict=True)
            known = ((x, i) if i in self.ids else (-torch.inf, 0) for x, i in pairs)
            return [logprobs[0], *(number for pair in known for number in pair)]
        asked = f"the token {token} ({own!r}) and {self.top} candidates"
        raise self.error(f"answered with {str(entry)[:200]} for {asked}", self.expected)


Reference = Policy | ServedTeacher


def compared_with(reference: Reference, batch: Batch, infer: Callable[..., Tensor]) -> dict[str, Any]:
    """Return the fields `ref_logprobs` of a batch and, of a served teacher that sends any, `candidates`.

    Args:
        reference: the reference, or the teacher.
        batch: the batch.
        infer: returns an output of a module for rollouts; see `rlhf.models.forward.infer`.
    """
    if isinstance(reference, Policy) or not reference.top:
        return {"ref_logprobs": infer(reference, batch.for_teacher(), "logprobs")}
    found = infer(reference, batch.for_teacher(), "candidates")
    candidates = {"ids": found[..., 2::2].long(), "logprobs": found[..., 1::2].contiguous()}
    return {"ref_logprobs": found[..., 0].contiguous(), "candidates": candidates}
