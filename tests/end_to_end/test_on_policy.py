"""Tests of on-policy runs: corrections change nothing, not even by rounding; noise is a mismatch."""

import pytest

from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from tests.end_to_end.conftest import UPDATES_ONLY, nightly, rows
from tests.end_to_end.test_algorithms import SCORED

BANDS = ("algo.correction.reject_low=0.9", "algo.correction.reject_high=1.1")
MINIBATCHES = "schedule.minibatches=2"


@pytest.mark.parametrize(
    "plain, corrected",
    [
        (["algo=grpo"], ["algo=grpo", "correction=truncate"]),
        nightly(["algo=grpo"], ["algo=grpo", "correction=icepop", "algo.correction.normalise=true"]),
        (["algo=grpo"], ["algo=grpo", "correction=seq_mask_tis", *BANDS]),
        (["algo=grpo"], ["algo=grpo", "algo.correction.kind=decoupled", "algo.correction.level=sequence"]),
        (["algo=grpo"], ["algo=grpo", "algo.anchor=behaviour"]),
        (["algo=grpo"], ["algo=grpo", "algo.anchor=loglinear", "algo.correction.kind=decoupled"]),
        (["algo=grpo"], ["algo=grpo", "algo.off_policy_mask=1e-9"]),
        (["algo=dapo"], ["algo=m2po", "algo.limit=1e-12"]),
        nightly(["algo=dapo"], ["algo=m2po", "algo.form=clip", "algo.limit=1e-12"]),
        (["algo=dapo"], ["algo=dppo", "algo.limit_high=1e-9", "algo.limit_low=1e-9"]),
        (["algo=dapo", "algo.scale=none"], ["algo=topr", "algo.level=token"]),
        (["algo=dpo"], ["algo=dpo", "algo.weighting=is"]),
        (["algo=grpo", MINIBATCHES], ["algo=grpo", MINIBATCHES, "correction=truncate"]),
        nightly(["algo=grpo", MINIBATCHES], ["algo=grpo", MINIBATCHES, "correction=seq_mask_tis", *BANDS]),
    ],
)
def test_an_on_policy_run_is_the_uncorrected_run(finished, tiny, tmp_path, plain, corrected):
    expected = finished(*plain, *SCORED, *UPDATES_ONLY)
    folder = RunFolder(tmp_path / "run")
    run(tiny(*corrected, *SCORED, *UPDATES_ONLY), folder)
    trained, uncorrected = ((each.model / "model.safetensors").read_bytes() for each in (folder, expected))
    assert trained == uncorrected


def test_noise_of_the_sampler_is_measured_as_mismatch_and_expected(tiny, tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    run(tiny("algo=grpo", "generator.noise=0.3", *SCORED, *UPDATES_ONLY), folder)
    assert "at the first update" not in capsys.readouterr().out
    half_variance = (0.3 / 0.7) ** 2 / 2  # mismatch/kl if all tokens are equally likely; otherwise it is less
    found = [row["mismatch/kl"] for row in rows(folder) if "lr" in row]
    assert len(found) == 2 and all(half_variance / 4 < value < 1.1 * half_variance for value in found)
