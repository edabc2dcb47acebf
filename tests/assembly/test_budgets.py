"""The limits of forward passes: without gradients, a pass has four times as many sequences and tokens."""

from rlhf.assembly.models import inference_budget, training_budget
from rlhf.core.batch import Budget
from rlhf.words.compose import compose


def test_a_limit_of_tokens_makes_forward_passes_without_gradients_larger():
    cfg = compose(["backend.micro_batch=8", "backend.tokens=1000"])
    assert training_budget(cfg) == Budget(8, 1000)
    assert inference_budget(cfg) == Budget(32, 4000)


def test_on_the_cpu_the_default_is_the_micro_batch_for_all_forward_passes():
    cfg = compose(["backend.micro_batch=8", "backend.device=cpu"])
    assert training_budget(cfg) == inference_budget(cfg) == Budget(8, None)
