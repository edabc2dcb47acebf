"""A scorer that calls the verifiers of the package reasoning-gym."""

from __future__ import annotations

import json
from ast import literal_eval
from functools import cache
from typing import TYPE_CHECKING, Any

from rlhf.scorers.programs import find_answer
from rlhf.scorers.scorer import Scorer, distinct_texts

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf.config.reasoning_gym import ReasoningGymScorerConfig
    from rlhf.core.batch import Rollouts


class ReasoningGymScorer(Scorer):
    """A scorer that returns the score of the verifier; with `exact`, 1 for a full score and otherwise 0.

    A response has the score 0 if it has no answer, or if the verifier raises an exception.
    """

    config: ReasoningGymScorerConfig

    def score(self, rollouts: Rollouts) -> Tensor:
        """Return the scores [N, K]."""
        return self._verified(rollouts)[0]

    def training_scores(self, rollouts: Rollouts) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scores [N, K], and as part `verifier_errors` 1 where the verifier raised, else 0."""
        scores, errors = self._verified(rollouts)
        return self.at_end(scores, rollouts.ended), {"verifier_errors": errors}

    def _verified(self, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        assert rollouts.records is not None, "validated: the task is reasoning_gym"
        texts = distinct_texts(rollouts, self.tokenizer)
        scores, errors = [], []
        for example, response in zip(texts.examples, texts.responses, strict=True):
            record, score, error = rollouts.records[example], 0.0, 0.0
            answer = response if self.config.pattern is None else find_answer(response, self.config.pattern)
            if answer is not None:
                try:
                    verifier = _verifier(record["dataset"], record["arguments"])
                    score = float(verifier.score_answer(answer.strip(), literal_eval(record["entry"])))
                except Exception:  # some verifiers raise at an answer that they cannot read
                    error = 1.0
            scores.append(float(score >= 1) if self.config.exact else score)
            errors.append(error)
        return texts.spread(scores), texts.spread(errors)


@cache
def _verifier(dataset: str, arguments: str) -> Any:
    """Return the data set of reasoning-gym with these arguments (JSON); its entries come from the records."""
    from reasoning_gym import create_dataset  # takes seconds

    return create_dataset(dataset, seed=0, size=1, **json.loads(arguments))
