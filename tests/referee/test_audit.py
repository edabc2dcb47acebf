"""Tests of the audit: recorded steps of TRL, each term, what a batch does not determine, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf.audit import main
from rlhf.core.errors import UserError
from rlhf.referee.audit import audit
from rlhf.referee.file import BatchFile, checked, read, write
from tests.referee.trainer import MISTAKES, shift, step

RECORDED = Path(__file__).parents[3] / "shared" / "prototypes" / "referee" / "batches"
CORRECT = (
    *("grpo", "bnpo", "dapo", "dapo_kl", "dr_grpo", "gspo", "cispo", "on_policy"),
    *("rloo", "rloo_normalized"),
)
recorded = pytest.mark.skipif(
    not RECORDED.exists(), reason="no recorded steps; enable with: a folder ../shared/prototypes/referee"
)


def of(
    setting: str, seed: int = 1, mistake: str | None = None, header: dict | None = None, **tensors
) -> BatchFile:
    given, its = step(setting, seed, mistake)
    kept = {name: x for name, x in (given | tensors).items() if x is not None}
    return checked(BatchFile(kept, its | (header or {})))


def finding(file: BatchFile, term: str):
    return next(each for each in audit(file) if each.term == term)


def wrong(file: BatchFile) -> list[str]:
    return [each.term for each in audit(file) if each.state == "wrong"]


# -- recorded steps of TRL


@recorded
@pytest.mark.parametrize("name", CORRECT)
@pytest.mark.parametrize("number", [1, 3])
def test_recorded_steps_agree_with_their_settings(name, number):
    file = read(RECORDED / f"{name}-{number}.safetensors")
    assert not wrong(file)
    for term in ("advantages", "loss"):
        text = finding(file, term).text
        assert float(text.rpartition("off by ")[2].rstrip(")")) <= 1e-5


@recorded
@pytest.mark.parametrize("name", CORRECT)
@pytest.mark.parametrize("number", [1, 3])
def test_recorded_steps_are_identified_without_settings(name, number):
    file = read(RECORDED / f"{name}-{number}.safetensors")
    claims = file.header["claims"]
    unclaimed = replace(file, header={**file.header, "claims": {}})
    found = {each.term: each for each in audit(unclaimed)}
    assert not wrong(unclaimed)
    in_reward = claims["kl_in"] == "reward"
    for term, keys in (("advantages", ["scale"]), ("loss", ["surrogate", "reduction", "kl_coef"])):
        known, _, unknown = found[term].text.partition("; this batch does not determine ")
        values = dict(part.split(" ", 1) for part in known.split(", "))
        for key in keys:
            true = 0.0 if key == "kl_coef" and in_reward else claims[key]
            if key in values and key == "kl_coef":
                assert float(values[key]) == pytest.approx(true, rel=1e-2)
            elif key in values:
                assert values[key] == str(true)
            else:
                assert f"{key} (" in unknown and str(true) in unknown


@recorded
@pytest.mark.parametrize(
    ("name", "factor"), [("online_dpo-1", 2), ("online_dpo-3", 2), ("online_dpo_4-1", 4), ("online_ipo-1", 2)]
)
def test_recorded_steps_of_online_dpo_are_not_divided_by_the_micro_batches(name, factor):
    found = finding(read(RECORDED / f"{name}.safetensors"), "reduction")
    assert found.state == "wrong" and "not divided" in found.text and f"(factor {factor})" in found.text


@recorded
@pytest.mark.parametrize(
    ("name", "term"),
    [
        ("bug_clip_inverted", "clipping"),
        ("bug_divided_twice", "reduction"),
        ("bug_ref_shifted", "ref_logprobs"),
    ],
)
def test_recorded_mistakes_are_named(name, term):
    assert wrong(read(RECORDED / f"{name}-1.safetensors"))[:1] == [term]


@recorded
@pytest.mark.parametrize(
    ("name", "term", "words"),
    [
        ("grpo", None, ""),
        ("bug_temperature", "weights", "temperature is missing"),
        ("bug_lost_micro_batches", "gradient", "only micro-batch 1 of 2 arrived"),
    ],
)
def test_weights_show_a_missing_temperature_and_lost_micro_batches(name, term, words):
    from rlhf.referee.audit import weights

    file = read(RECORDED / f"{name}-1.safetensors")
    found = list(weights(file, RECORDED / f"{name}-model-1"))
    bad = [each for each in found if each.state == "wrong"]
    assert [each.term for each in bad] == ([term] if term else []) and all(words in each.text for each in bad)
    assert len(found) == (1 if term == "weights" else 2)


@recorded
def test_weights_in_a_pickle_are_refused(tmp_path):
    from safetensors.torch import load_file

    from rlhf.referee.audit import weights

    source = RECORDED / "grpo-model-1"
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    torch.save(load_file(source / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        list(weights(read(RECORDED / "grpo-1.safetensors"), tmp_path))


# -- terms


def test_two_mistakes_in_different_terms_are_both_named_in_the_order_of_the_computation():
    file = of(
        "grpo", mistake="kl_doubled", header={"claims": step("grpo", 1)[1]["claims"] | {"scale": "none"}}
    )
    assert wrong(file) == ["advantages", "KL"]


def test_two_mistakes_in_the_loss_are_both_named():
    claims = step("dapo", 1)[1]["claims"]
    both = of("dapo", mistake="kl_doubled", header={"claims": claims | {"reduction": "sequence"}})
    assert wrong(both) == ["KL", "reduction"]
    factor = of("dapo", mistake="kl_doubled")
    assert wrong(factor.changed(logprob_grads=3 * factor["logprob_grads"])) == ["KL", "reduction"]


def test_a_mistake_in_no_row_is_wrong_and_has_the_place_of_the_first_token_that_differs():
    file = of("dapo")
    gradient = file["logprob_grads"].clone()
    row, place = file.mask.nonzero()[100].tolist()
    gradient[row, place] += 0.5
    found = finding(file.changed(logprob_grads=gradient), "loss")
    assert found.state == "wrong"
    assert f"1 tokens of 1 responses differ, the first at row {row}, position {place}" in found.text


def test_a_lost_micro_batch_and_a_factor_are_those_of_the_reduction():
    file = of("grpo")
    first = (file["micro_batch"] == 0)[:, None]
    lost = finding(file.changed(logprob_grads=file["logprob_grads"] * ~first), "reduction")
    assert "micro-batches 0 of 4 are lost" in lost.text
    assert (
        "divided once more"
        in finding(file.changed(logprob_grads=file["logprob_grads"] / 4), "reduction").text
    )
    assert (
        "3 times as large" in finding(file.changed(logprob_grads=file["logprob_grads"] * 3), "reduction").text
    )


def test_a_right_gradient_with_a_wrong_reported_loss_is_said():
    file = of("grpo")
    found = finding(file.changed(losses=file["losses"] + 1), "loss")
    assert found.state == "wrong" and "reported loss" in found.text
    assert finding(file.changed(losses=file["losses"] * 4), "loss").state == "ok"  # means of micro-batches


def test_advantages_of_0_without_penalty_are_unchecked():
    zeros = {"advantages": torch.zeros(24), "rewards": torch.ones(24), "logprob_grads": torch.zeros(24, 20)}
    file = of("opo", losses=torch.zeros(4), **zeros)
    assert finding(file, "loss").state == "unchecked" and "advantages are 0" in finding(file, "loss").text
    assert not wrong(file)


@pytest.mark.parametrize(
    ("setting", "name", "term"),
    [
        ("grpo", "ref_logprobs", "loss"),
        ("distill", "teacher_logprobs", "loss"),
        ("truncate", "behaviour_logprobs", "loss"),
        ("scalerl", "group", "loss"),
        ("grpo", "advantages", "advantages"),
        ("grpo", "rewards", "advantages"),
        ("reinforce", "ref_logprobs", "advantages"),
        ("dpo", "ref_logprobs", "loss"),
        ("ppo", "returns", "values"),
    ],
)
def test_a_claim_that_needs_a_missing_tensor_is_unchecked_with_its_name(setting, name, term):
    file = of(setting, **{name: None})
    assert not wrong(file)
    assert finding(file, term).state == "unchecked"
    needs = "all_rewards" if name == "rewards" else name
    assert needs in finding(file, term).text


def test_without_gradient_and_losses_the_loss_is_unchecked():
    assert finding(of("grpo", logprob_grads=None, losses=None), "loss").state == "unchecked"


def test_few_tokens_and_equal_log_probs_are_unchecked():
    small = of("grpo").rows(torch.arange(2))
    small = small.changed(response_mask=small.mask & (torch.arange(20) < 5), losses=None, logprob_grads=None)
    assert finding(small, "log-probs").state == "unchecked"
    file = of("dapo")
    equal = {
        name: torch.full_like(file["logprobs"], -1)
        for name in ("logprobs", "old_logprobs", "behaviour_logprobs")
    }
    assert finding(file.changed(ref_logprobs=None, **equal), "log-probs").state == "unchecked"


@pytest.mark.parametrize("claims", [{}, {"kl_coef": 0.05, "reduction": "token"}])
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_few_and_uneven_rows_end_without_an_exception(rows, claims):
    """One response, groups of unequal size, a group of one, an empty response, one token."""
    given, header = step("grpo", 1)
    some = {name: x[:rows].clone() for name, x in given.items() if name != "losses"}
    some["response_mask"][-1] = 0
    audit(checked(BatchFile(some, header | {"claims": claims})))
    one = {name: x[:1, :1] if x.dim() == 2 else x[:1] for name, x in some.items()}
    one["response_mask"] = torch.ones(1, 1)
    audit(checked(BatchFile(one, header | {"claims": claims})))
    one["response_mask"] = torch.zeros(1, 1)
    audit(checked(BatchFile(one, header | {"claims": claims})))


@pytest.mark.parametrize(
    ("norms", "state"), [({"1": 1.0, "4": 0.41}, "wrong"), ({"1": 1.0, "4": 1.0004}, "ok")]
)
def test_a_norm_that_depends_on_the_number_of_micro_batches_is_wrong(norms, state):
    assert finding(of("grpo", header={"grad_norms": norms}), "gradient").state == state


def test_two_bytes_have_a_larger_tolerance_and_determine_less():
    half = {name: step("grpo", 1)[0][name].bfloat16() for name in ("logprobs", "logprob_grads")}
    assert not wrong(of("grpo", **half))
    claims = step("grpo", 1)[1]["claims"] | {"kl_coef": 1e-3}
    without = {"mistake": "kl_missing", "losses": None}  # a penalty that is smaller than the tolerance
    found = finding(of("grpo", header={"claims": claims, "dtype": "bfloat16"}, **without), "loss")
    assert found.state == "ok" and "kl (k3, " in found.text.partition("does not determine")[2]
    assert wrong(of("grpo", header={"claims": claims}, **without)) == ["KL"]


def test_bounds_that_no_ratio_reaches_are_not_determined():
    given, header = step("opo", 1)
    mask = given["response_mask"]
    on_policy = {
        "old_logprobs": given["logprobs"],
        "logprob_grads": -(given["advantages"][:, None] * mask / mask.sum()),
        "losses": None,
    }
    text = finding(
        of("opo", header={"claims": header["claims"], "updates_since_old": 0}, **on_policy), "loss"
    ).text
    unknown = text.partition("does not determine ")[2]
    assert "clip_low (" in unknown and "clip_high (" in unknown and "ratio (" in unknown


@pytest.mark.parametrize("since", [0, 1])
def test_old_log_probs_must_fit_the_number_of_updates(since):
    file = of("dapo", header={"updates_since_old": since})
    assert wrong(file) == ([] if since else ["old_logprobs"])
    fresh = of("dapo", old_logprobs=step("dapo", 1)[0]["logprobs"], header={"updates_since_old": since})
    assert ("old_logprobs" in wrong(fresh)) == bool(since)


def test_noise_of_the_sampler_is_no_other_temperature():
    g = torch.Generator().manual_seed(0)
    narrow = -1 + 0.05 * torch.randn(24, 20, generator=g)  # the noise is larger than the spread
    file = of("dapo").changed(behaviour_logprobs=narrow.double())
    trainer = (narrow + 0.2 * torch.randn(24, 20, generator=g)).double()
    file = file.changed(old_logprobs=trainer, logprobs=trainer)
    assert "behaviour_logprobs" not in wrong(file)


@pytest.mark.parametrize(
    "claims",
    [
        *({"ratio": "tokens"}, {"kl_coef": "0.1"}, {"kl_coef": float("nan")}, {"kl_times_ratio": 3}),
        *({"correction": {"unknown": 1}}, {"correction": {"kind": "other"}}, {"correction": 1}),
        *({"temperature": 0}, {"surrogate": "sigmoid"}, {"surrogate": ["clip"]}),
        *({"options": {"unknown": 1}}, {"over": "3 parts"}),
    ],
)
def test_a_claim_that_is_no_value_of_its_setting_is_refused(claims):
    with pytest.raises(UserError):
        audit(of("dapo", header={"claims": claims}))


def test_surrogates_of_the_algorithms_are_recomputed():
    for surrogate in ("sapo", "vespo", "dppo"):
        file = of("opo", header={"claims": step("opo", 1)[1]["claims"] | {"surrogate": surrogate}})
        assert wrong(file) == ["surrogate"]  # it was the clipped ratio


def test_given_weights_multiply_the_policy_term():
    file = of("truncate")
    plain = {k: v for k, v in file.header["claims"].items() if k != "correction"}
    old = file["old_logprobs"] - file["behaviour_logprobs"]
    given = replace(file, header={**file.header, "claims": plain}).changed(weights=old.exp().clamp(max=1.1))
    assert not wrong(given)
    assert wrong(given.changed(weights=None)) != []


# -- the command


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step-1.safetensors"


@pytest.fixture
def command(called):
    """`command(*words)` calls `rlhf audit` and returns exit code, stdout and stderr."""
    return lambda *words: called(main, *map(str, words))


@pytest.mark.parametrize(("mistake", "code"), [(None, 0), ("kl_doubled", 1)])
def test_the_exit_code_is_1_if_a_term_is_wrong(command, path, mistake, code):
    write(path, *step("grpo", 1, mistake))
    found, out, _ = command(path)
    assert found == code
    assert out.splitlines()[0].startswith("step-1.safetensors: trainer.py grpo, step 1, 24 responses, ")
    assert out.splitlines()[-1].startswith("agrees" if code == 0 else "first wrong term: KL: ")


def test_json_has_term_state_and_text(command, path):
    write(path, *step("grpo", 1, "kl_doubled"))
    code, out, _ = command(path, "--json")
    rows = json.loads(out)
    assert code == 1 and all(set(row) == {"term", "state", "text"} for row in rows)
    assert [row["term"] for row in rows if row["state"] == "wrong"] == ["KL"]


def test_claims_are_ignored_if_asked(command, path):
    tensors, header = step("opo", 1)
    write(path, tensors, header | {"claims": header["claims"] | {"reduction": "sequence"}})
    assert command(path)[0] == 1
    code, out, _ = command(path, "--ignore-claims")
    assert code == 0 and "reduction token" in out and "identified" in out.splitlines()[0]


def test_a_mistake_of_the_user_is_exit_code_2_and_no_traceback(command, path, tmp_path):
    path.write_text("no batch")
    assert command(path)[::2][0] == 2
    write(path, *step("grpo", 1))
    for words in (["--mistakes", tmp_path / "none.yaml"], ["--model", tmp_path], ["--unknown"]):
        code, out, err = command(path, *words)
        assert code == 2 and "Traceback" not in err and err.count("error: ") == 1


def test_rows_of_a_file_are_added(command, path, tmp_path):
    tensors, header = step("dapo", 1)
    write(path, tensors | {"old_logprobs": 1.07 * tensors["old_logprobs"]}, header)
    own = tmp_path / "own.yaml"
    own.write_text(
        "loss:\n  - [ratio, seven percent more, {old_logprobs: 0.934579439252336*$old_logprobs}]\n"
    )
    assert "seven percent more" in command(path, "--mistakes", own)[1]


@pytest.mark.process
def test_the_audit_imports_no_transformers(path):
    write(path, *step("grpo", 1))
    script = (
        "import sys; sys.modules.update(dict.fromkeys(['transformers', 'datasets', 'tokenizers', 'vllm']))\n"
        f"from rlhf.audit import main\nmain([{str(path)!r}])"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_shifted_log_probs_are_those_of_a_position():
    for name in ("old_logprobs", "ref_logprobs", "behaviour_logprobs"):
        for by in (1, -1):
            given = step("grpo", 1)[0][name]
            assert name in wrong(of("grpo", **{name: shift(given, by)}))
    assert "kl_doubled" in MISTAKES


@pytest.mark.parametrize("where", ["last token", "negative advantages", "micro-batch 2"])
def test_an_unknown_mistake_is_located_by_the_tokens_that_differ(where):
    tensors, header = step("dapo", 1)
    mask, wrong = tensors["response_mask"].bool(), tensors["logprob_grads"].clone()
    at = {
        "last token": mask & (mask.cumsum(1) == mask.sum(1, keepdim=True)),
        "negative advantages": mask & (tensors["advantages"] < 0)[:, None],
        "micro-batch 2": mask & (tensors["micro_batch"] == 2)[:, None],
    }[where]
    wrong[at] = 1.3 * wrong[at] + 0.002
    findings = audit(checked(BatchFile(tensors | {"logprob_grads": wrong}, header)))
    assert [each.term for each in findings if each.state == "wrong"] == ["loss"]
    assert findings[-1].text.count(where) == 1 and f"{int(at.sum())} tokens" in findings[-1].text
