"""A teacher that a server of vLLM runs: it reads prompts and responses as token ids, and sends log-probs.

Each response is a request to the route /v1/completions, with the ids of prompt and response as the prompt.
`prompt_logprobs=0` asks for the log-prob of each of these tokens, which ignores the temperature.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf.config.scorers import ServedTeacherConfig
from rlhf.core.batch import Outputs, Rollouts
from rlhf.core.metrics import selected
from rlhf.models.modules import Policy
from rlhf.scorers.http import HttpClient


class ServedTeacher(HttpClient):
    """A frozen policy whose log-probs a server sends, at temperature 1. Every rank asks for its part.

    Args:
        config: config section of the server.
        model: the name of the model on the server.
        tokenizer: the tokenizer of the policy.

    Raises:
        UserError: the environment variable with the key is not set.
    """

    def __init__(self, config: ServedTeacherConfig, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__("algo.teacher", config, f"{config.url}/v1/completions")
        self.model, self.tokenizer = model, tokenizer
        self.expected = f"it must be vLLM with the model {model} and the tokenizer of the policy; correct it"

    def at(self, temperature: float) -> ServedTeacher:
        """Return this teacher, whose temperature is 1."""
        return self

    def __call__(self, batch: Rollouts) -> Outputs:
        """Return the log-probs [N, K, T] of the responses, on the CPU.

        Raises:
            RunError: the server cannot be reached, refuses a request, or does not answer as it must.
            Interrupted: a signal was received.
        """
        batch = batch.to(torch.device("cpu"))
        flat = (x.flatten(0, 1) for x in (batch.response_ids, batch.real))
        prompts, responses = batch.unpadded(), [ids[real].tolist() for ids, real in zip(*flat, strict=True)]

        def ask(i: int, deadline: float) -> list[float]:
            return self.ask(prompts[i * len(prompts) // len(responses)], responses[i], deadline)

        logprobs = torch.zeros(batch.real.shape)
        logprobs[batch.real] = torch.tensor([each for row in self.all(ask, len(responses)) for each in row])
        return Outputs(logprobs=selected(logprobs, batch.response_mask))

    def ask(self, prompt: list[int], response: list[int], deadline: float) -> list[float]:
        """Return the log-probs of the tokens of a response, in one try.

        Raises:
            Again: the try may be repeated.
            RunError: the server refuses the request, or does not answer as it must.
        """
        ids = [*prompt, *response]
        question = {"model": self.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        content, problem = self.post(question, self.expected, len(ids), deadline)
        with suppress(AttributeError, LookupError, TypeError):  # of an answer in another form
            entries = content["choices"][0]["prompt_logprobs"]
            problem = f"log-probs of {len(entries)} tokens for {len(ids)}"
            if len(entries) == len(ids):
                return [self.read(*each) for each in zip(entries[len(prompt) :], response, strict=True)]
        raise self.error(f"answered with status 200 and {problem}", self.expected)

    def read(self, entry: dict[str, dict[str, Any]], token: int) -> float:
        """Return the log-prob of a token.

        Raises:
            RunError: it is missing or no number, or the server has another text for the token.
        """
        own, found = str(self.tokenizer.decode([token])), entry.get(str(token), {})
        text, logprob = str(found.get("decoded_token")), found.get("logprob")
        # Texts of a part of a character (U+FFFD) depend on the tokens before; white space is not always kept.
        same = "\ufffd" in own or text.strip() == own.strip()
        if same and isinstance(logprob, float | int) and -9999 < logprob < 1e-3:  # -9999: NaN or -inf in vLLM
            return float(logprob)
        raise self.error(f"answered with {entry} for the token {token} ({own!r})", self.expected)


Reference = Policy | ServedTeacher
