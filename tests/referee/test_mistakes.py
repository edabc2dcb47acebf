"""Tests of the table of mistakes: mistakes of a small trainer are named at the right term."""

from __future__ import annotations

import pytest
import torch

from rlhf.core.errors import UserError
from rlhf.referee.audit import audit
from rlhf.referee.file import BatchFile, checked
from rlhf.referee.recipe import SETTINGS, TABLE, Recipe, own_rows, rows, twisted
from tests.referee.trainer import MISTAKES, step
from tests.referee.trainer import SETTINGS as CASES


def wrong(tensors, header, **more):
    return [each for each in audit(checked(BatchFile(tensors, header)), **more) if each.state == "wrong"]


@pytest.mark.parametrize("setting", CASES)
def test_a_correct_step_has_no_wrong_term(setting):
    tensors, header = step(setting, 1)
    findings = audit(checked(BatchFile(tensors, header)))
    assert not [each for each in findings if each.state == "wrong"]
    assert [each.state for each in findings if each.term == "loss"] == ["ok"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_at_its_term(mistake):
    settings, terms = MISTAKES[mistake]
    for setting in settings:
        found = wrong(*step(setting, 1, mistake))
        assert found and found[0].term in terms, (setting, found)


def test_smaller_groups_that_are_divided_by_the_size_of_the_largest_are_named():
    tensors, header = step("grpo", 1)
    rewards, group = tensors["rewards"].double(), torch.arange(len(tensors["rewards"])) * 3 // 8
    others = torch.stack([rewards[group == each].sum() for each in group]) - rewards
    most = int(group.bincount().max())
    assert most > int(group.bincount().min()) > 1
    header["claims"] |= {"advantage": "leave_one_out", "scale": "none"}
    tensors |= {"group": group, "advantages": (rewards - others / (most - 1)).float()}
    (row,) = (row for row in TABLE["stages"]["advantages"]["rows"] if row[2] == {"full": True})
    found = wrong(tensors, header)
    assert found[0].term == "advantages" and row[1] in found[0].text


def test_equal_rewards_whose_mean_float32_rounds_are_no_alarm():
    tensors, header = step("grpo", 1)
    header["claims"] |= {"std_eps": 1e-8}
    size = len(tensors["rewards"]) // len(tensors["group"].unique())
    groups = tensors["rewards"].view(-1, size).clone()
    groups[0] = 0.3
    mean = groups.mean(1, keepdim=True) + 3e-8  # however the framework sums
    tensors |= {"rewards": groups.flatten()}
    tensors["advantages"] = ((groups - mean) / (groups.std(1, keepdim=True) + 1e-8)).flatten()
    assert float(tensors["advantages"][0].abs()) > 0.1
    del tensors["logprob_grads"], tensors["losses"]
    assert not wrong(tensors, header)


def test_only_the_rows_of_a_rank_were_compared():
    tensors, header = step("grpo", 1)
    rewards = tensors["rewards"].double()
    group = torch.arange(len(rewards)) % (len(rewards) // 8)
    halves = group * 2 + torch.arange(len(rewards)) * 2 // len(rewards)
    parts = [rewards[halves == each] for each in halves]
    a = torch.stack([(r - x.mean()) / (x.std() + 1e-4) for r, x in zip(rewards, parts, strict=True)])
    (row,) = (row for row in TABLE["stages"]["advantages"]["rows"] if "by_half" in str(row[2]))
    found = wrong(tensors | {"group": group, "advantages": a}, header)
    assert found[0].term == "advantages" and row[1] in found[0].text


def test_tokens_may_be_whitened_by_the_biased_deviation():
    tensors, header = step("ppo", 1)
    count = int(tensors["response_mask"].sum())
    tensors["advantages"] *= (count / (count - 1)) ** 0.5
    tensors = {name: x for name, x in tensors.items() if name not in ("logprob_grads", "losses")}
    assert not wrong(tensors, header)
    tensors["advantages"] *= 1.01
    assert wrong(tensors, header)


@pytest.mark.parametrize("dropped", [True, False])
def test_rows_without_trained_tokens_may_count_in_the_mean_or_not(dropped):
    tensors, header = step("grpo", 1)
    count = len(tensors["response_mask"])
    tensors["response_mask"][:4] = 0
    tensors["logprob_grads"][:4] = 0
    tensors["logprob_grads"] *= count / (count - 4) if dropped else 1
    tensors["losses"] += 0.1  # some report the advantages of these rows
    assert not wrong(tensors, header)
    tensors["logprob_grads"] *= 1.1
    assert wrong(tensors, header)


def test_an_end_token_that_is_also_the_padding_may_be_missing_at_some_responses_only():
    tensors, header = step("grpo", 1)
    ids, mask = tensors["response_ids"], tensors["response_mask"]
    ids[ids == header["pad_id"]] = header["eos_ids"][0]
    header["pad_id"] = header["eos_ids"][0]
    ended = ((mask != 0) & (ids == header["pad_id"])).nonzero()
    assert len(ended) > len(mask) / 2
    some, every = mask.clone(), mask.clone()
    some[ended[0, 0], ended[0, 1]] = 0  # a stop text ended it
    every[ended[:, 0], ended[:, 1]] = 0
    assert not [each for each in wrong({**tensors, "response_mask": some}, header) if each.term == "mask"]
    assert wrong({**tensors, "response_mask": every}, header)[0].term == "mask"


def test_a_mean_over_prompt_and_response_is_named():
    tensors, header = step("gspo_token", 1)
    tensors["prompt_mask"] = torch.arange(6) >= torch.arange(len(tensors["rewards"]))[:, None] % 5
    lengths, prompts = (
        tensors["response_mask"].sum(1, keepdim=True),
        tensors["prompt_mask"].sum(1, keepdim=True),
    )
    tensors["logprob_grads"] *= lengths / (lengths + prompts)
    assert wrong(tensors, header)[0].term == "reduction"


def test_a_large_loss_of_values_in_float32_is_no_alarm():
    tensors, header = step("ppo", 1)
    header["claims"] |= {"advantage": "given", "vf_coef": 1.0}
    mask, returns, micro = tensors["response_mask"], 1000 * tensors["returns"], tensors["micro_batch"]
    tensors |= {name: 1e-3 * torch.ones_like(returns) for name in ("values", "old_values")}
    gap = (tensors["values"] - returns) * mask
    losses = torch.stack([gap[micro == part].square().sum() for part in micro.unique()]) / mask.sum()
    tensors |= {"returns": returns, "value_grads": 2 * gap / mask.sum(), "value_losses": losses * (1 + 2e-7)}
    assert not wrong(tensors, header)
    assert wrong({**tensors, "value_losses": 1.01 * losses}, header)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bfloat16_decides_whether_a_ratio_near_a_bound_is_clipped(dtype):
    tensors, header = step("opo", 1)
    ratio = (tensors["logprobs"] - tensors["old_logprobs"]).double().exp()
    inside = (ratio < 1.19) & (ratio > 0.81) & (tensors["response_mask"] != 0)
    row, place = (inside & (tensors["advantages"].view(len(ratio), -1) > 0)).nonzero()[0].tolist()
    tensors["old_logprobs"][row, place] = tensors["logprobs"][row, place] - 0.1875  # 1.206; 1.203 in bfloat16
    tensors["logprob_grads"][row, place] *= 1.206 / ratio[row, place]
    del tensors["losses"]
    assert bool(wrong(tensors, {**header, "dtype": dtype})) == (dtype == "float32")


def test_most_mistakes_are_found_by_the_losses_of_micro_batches():
    named, some = 0, list(MISTAKES.items())[::4]
    for mistake, (settings, terms) in some:
        tensors, header = step(settings[0], 1, mistake)
        found = wrong({k: x for k, x in tensors.items() if not k.endswith("_grads")}, header)
        named += bool(found) and found[0].term in terms
    assert named >= 0.8 * len(some)


def test_correct_losses_of_micro_batches_are_no_alarm():
    for setting in ("ppo", "grpo", "dapo", "reject", "dpo"):
        tensors, header = step(setting, 1)
        assert not wrong({k: x for k, x in tensors.items() if not k.endswith("_grads")}, header)


@pytest.mark.parametrize("stage", TABLE["stages"])
def test_the_families_have_every_setting_tensor_and_mask(stage):
    """Each value of a setting, and each tensor missing, negated, moved, is a row of its stage."""
    changes = [
        change for _, _, change in rows(stage, Recipe(**{key: row[0] for key, row in SETTINGS.items()}))
    ]
    table = TABLE["stages"][stage]
    for key in (key for keys in table["settings"] for key in keys):
        others = [value for value in SETTINGS[key][2] if value not in (SETTINGS[key][0], "given", "gae")]
        assert all({key: value} in changes for value in others) or any(key in c for c in changes)
    for name in table["moves"]:
        forms = [change[name] for change in changes if list(change) == [name]]
        assert (
            None in forms
            and f"-1*${name}" in forms
            and {f"${name} {by}" for by in (">>", "<<", "vv", "^^")} <= {*forms}
        )
    for name in table["factors"]:
        assert {f"{factor}*${name}" for factor in ("0", "-1", "0.5", "2")} <= {c.get(name) for c in changes}
    for name in table["masks"]:
        ends = {f"${name} {edge}" for edge in ("after", "before", "without_last", "without_first")}
        assert ends <= {change.get(name) for change in changes}


def test_every_name_of_the_table_is_a_setting_or_a_tensor_and_has_a_term():
    for stage in TABLE["stages"]:
        for term, words, change in rows(stage, Recipe(**{key: row[0] for key, row in SETTINGS.items()})):
            assert term and words
            names = {key.partition(".")[0] for key in change}
            assert names <= {*SETTINGS, *TABLE["tensors"], *TABLE["twists"]}, change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"old_logprobs": "$old_logprobs >>"}, lambda x: x.roll(1, 1)),
        ({"old_logprobs": "$old_logprobs <<0"}, lambda x: torch.cat([x[:, 1:], 0 * x[:, :1]], 1)),
        ({"old_logprobs": "-1*$old_logprobs vv"}, lambda x: -x.roll(1, 0)),
        ({"old_logprobs": "2*$old_logprobs flipped"}, lambda x: 2 * x.flip(0)),
    ],
)
def test_a_change_moves_a_tensor(change, expected):
    file = checked(BatchFile(*step("grpo", 1)))
    changed, _ = twisted(file, Recipe.of(file), change)
    assert torch.equal(changed["old_logprobs"], expected(file["old_logprobs"]))


def test_a_tensor_that_is_padded_on_the_left_has_its_tokens_at_the_end_of_the_row():
    file = checked(BatchFile(*step("grpo", 1)))
    changed, _ = twisted(file, Recipe.of(file), {"old_logprobs": "$old_logprobs left"})
    for row, (mask, x) in enumerate(zip(file.mask, file["old_logprobs"], strict=True)):
        count = int(mask.sum())
        assert torch.equal(changed["old_logprobs"][row, len(mask) - count :], x[:count])


def test_a_row_that_needs_a_tensor_of_the_file_that_is_missing_is_not_tried():
    file = checked(BatchFile(*step("dapo", 1))).changed(behaviour_logprobs=None)
    recipe = Recipe.of(file)
    assert twisted(file, recipe, {"old_logprobs": "$behaviour_logprobs"}) is None
    assert twisted(file, recipe, {"weights": "$weights squared"}) is None


def test_a_row_of_the_user_names_a_mistake_that_the_table_does_not_have(tmp_path):
    """The loss is three times as large where the advantage is that of another sampler: no row knows that."""
    tensors, header = step("dapo", 1)
    seventh = tensors | {"old_logprobs": 1.07 * tensors["old_logprobs"]}
    assert "a seventh" not in wrong(seventh, header)[-1].text
    file = tmp_path / "own.yaml"
    file.write_text("loss:\n  - [ratio, a seventh more, {old_logprobs: 0.934579439252336*$old_logprobs}]\n")
    found = wrong(seventh, header, own=own_rows(file))
    assert [each.term for each in found] == ["ratio"] and "a seventh more" in found[0].text


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "- 1",
        "a text",
        "other: []",
        "loss: 3",
        "loss: [[KL, words]]",
        "loss: [[KL, words, {unknown: 1}]]",
        "loss: [1]",
    ],
)
def test_rows_of_the_user_that_are_no_rows_are_refused(tmp_path, text):
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        own_rows(file)
    assert len(error.value.problems) == 1
    with pytest.raises(UserError):
        own_rows(tmp_path / "none.yaml")


def test_given_weights_are_compared_with_the_correction_that_the_settings_say():
    tensors, header = step("truncate", 1, "weights_not_capped")
    gap = tensors["old_logprobs"] - tensors["behaviour_logprobs"]
    given = tensors | {"weights": gap.exp()}
    assert [each.term for each in wrong(given, header)] == ["correction"]
    claims = {key: value for key, value in header["claims"].items() if key != "correction"}
    assert not wrong(given, header | {"claims": claims})  # nothing says that they have a bound


def test_a_kl_of_later_tokens_and_another_constant_of_a_deviation_are_no_alarm():
    tensors, header = step("reinforce", 1)
    mask = tensors["response_mask"].double()
    kl = 0.1 * (tensors["old_logprobs"] - tensors["ref_logprobs"]).double() * mask
    later = tensors["rewards"].double()[:, None] - kl.flip(1).cumsum(1).flip(1)
    white = (later - later[mask > 0].mean()) / later[mask > 0].std() * mask
    found = tensors | {"advantages": white.float()}
    claims = header["claims"] | {"whiten": "tokens"}
    assert "advantages" not in [each.term for each in wrong(found, header | {"claims": claims})]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_penalty_of_a_large_batch_that_is_not_divided_is_named(dtype):
    """Mistakes are tried on some of the rows only, if there are many tokens."""
    g = torch.Generator().manual_seed(0)
    shape = (40, 2048)
    now, old, ref = (-1 - torch.rand(*shape, generator=g, dtype=torch.float64) for _ in range(3))
    old, ref = now + 0.1 * (old - now), now + 0.3 * (ref - now)
    micro, rewards = torch.arange(40) // 10, torch.randn(40, generator=g, dtype=torch.float64)
    a = rewards - rewards.view(-1, 4).mean(1).repeat_interleave(4)
    x = now.clone().requires_grad_()
    u, k = (x - old).exp(), ref - x
    policy = torch.max(-a[:, None] * u, -a[:, None] * u.clamp(0.8, 1.2))
    ((policy + 4 * 0.05 * (k.exp() - k - 1)).sum() / now.numel()).backward()
    tensors = {"response_mask": torch.ones(shape), "logprobs": now, "old_logprobs": old, "ref_logprobs": ref}
    tensors |= {"advantages": a, "rewards": rewards, "group": torch.arange(40) // 4, "micro_batch": micro}
    claims = {"scale": "none", "kl_coef": 0.05, "reduction": "token"}
    found = wrong(tensors | {"logprob_grads": x.grad}, {"schema": 1, "claims": claims, "dtype": dtype})
    assert [each.term for each in found] == ["KL"]
    assert "4 times" in found[0].text or dtype == "bfloat16"  # its tolerance is nearly the effect


def test_mistakes_are_tried_where_nothing_bounds_the_ratio():
    tensors, header = step("dapo", 1)
    claims = header["claims"] | {"clip_low": 1.0, "clip_high": 1e9}
    found = wrong(tensors, header | {"claims": claims})
    assert [each.term for each in found] == ["clipping"]
