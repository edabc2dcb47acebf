"""Which ranks load a model, and the limits of forward passes."""

import pytest
import torch

from rlhf.assembly.models import inference_budget, loaded, training_budget
from rlhf.core.batch import Budget
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
        (["backend=fsdp2"], True),
        (["backend=zero2_offload"], False),
        (["backend=torch"], False),
        (["backend=zero3", "model=pythia_410m", "model.trust_remote_code=true"], False),
    ],
)
def test_only_the_first_rank_loads_a_model_that_is_divided(words, received):
    cfg, made = compose(words), torch.nn.Linear(1, 1)
    found = loaded(lambda: made, cfg, Second(rank=1, size=2))
    assert found == "from the first" if received else found is made
    assert loaded(lambda: made, cfg, Ranks()) is made


def test_passes_without_gradients_have_four_times_the_sequences_if_their_tokens_are_limited():
    cfg = compose(["backend.micro_batch=8", "backend.tokens=1000"])
    assert (training_budget(cfg), inference_budget(cfg)) == (Budget(8, 1000), Budget(32, 4000))
    cfg = compose(["backend.micro_batch=8", "backend.device=cpu"])
    assert training_budget(cfg) == inference_budget(cfg) == Budget(8, None)
