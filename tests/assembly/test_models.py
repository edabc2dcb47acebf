"""Tests of which ranks load a model."""

import pytest
import torch

from rlhf.assembly import models
from rlhf.processes.ranks import Ranks
from rlhf.words.compose import compose


class Second(Ranks):
    """The second of two ranks, which receives "from the first" from the first rank."""

    def from_first(self, make):
        return "from the first"


@pytest.mark.parametrize(
    ("words", "received"),
    [
        (["backend=zero3"], True),
        (["backend=zero3_offload"], True),
        (["backend=zero2_offload"], False),
        (["backend=torch"], False),
        (["backend=zero3", "model=pythia_410m", "model.trust_remote_code=true"], False),
    ],
)
def test_only_the_first_rank_loads_a_model_that_is_divided(words, received):
    cfg, made = compose(words), torch.nn.Linear(1, 1)
    found = models.loaded(lambda: made, cfg, Second(rank=1, size=2))
    assert found == "from the first" if received else found is made
    assert models.loaded(lambda: made, cfg, Ranks()) is made
