"""Settings that do not change the name of a run."""

import pytest

from rlhf.words.compose import compose
from rlhf.words.identity import digest


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("model.attention=auto", True),
        ("model.attention=sdpa", True),
        ("model.fused_head=null", True),
        ("model.attention=eager", False),
        ("model.fused_head=true", False),
    ],
)
def test_kernels_that_the_run_chooses_itself_do_not_change_the_name(words, same):
    assert (digest(compose([words])) == digest(compose([]))) == same
