"""Tests of `rlhf audit` and docs/hooks/ with trainers of TRL, and with functions of verl and OpenRLHF."""

import importlib
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests import needs
from tests.referee import verdicts

pytestmark = [pytest.mark.nightly, pytest.mark.process]

ROOT = Path(__file__).parents[2]
LARGEST_GAP = 1e-5  # of the gradient by log-probs, relative


@pytest.fixture(scope="module", params=["trl", "verl"])
def dumped(request, tmp_path_factory):
    """Return the folder of the dumped steps of a framework, and what is expected of each case."""
    if not verdicts.python(request.param).exists():
        pytest.skip(needs.TRL if request.param == "trl" else needs.VERL)
    folder = tmp_path_factory.mktemp(request.param)
    return folder, verdicts.dump(request.param, folder)


def test_steps_agree_with_the_settings_of_their_trainer(dumped):
    folder, expected = dumped
    correct = {name: case for name, case in expected.items() if case["term"] is None}
    assert len(correct) >= 10
    for name, case in correct.items():
        steps = verdicts.files(folder / name, case["model"])
        assert len(steps) == 2, name
        for words in steps:
            code, found = verdicts.findings(words)
            states = {each["term"]: each["state"] for each in found}
            assert code == 0 and "wrong" not in states.values(), (words, found)
            assert states["mask"] == states["loss"] == "ok", (words, found)
            assert states.get("advantages", "ok") == "ok", (words, found)
            loss = next(each["text"] for each in found if each["term"] == "loss")
            assert float(loss.rpartition("(off by ")[2].rstrip(")")) <= LARGEST_GAP, (words, loss)
            if case["model"]:
                assert states["weights"] == states["gradient"] == "ok", (words, found)


def test_mistakes_that_are_made_in_the_framework_are_the_first_wrong_term(dumped):
    folder, expected = dumped
    wrong = {name: case for name, case in expected.items() if case["term"] and "online" not in name}
    assert wrong
    for name, case in wrong.items():
        for words in verdicts.files(folder / name, case["model"]):
            assert verdicts.audited(*words)[0] == 1
            assert verdicts.expects(case, verdicts.verdict(words)), (words, verdicts.verdict(words))


def test_gradients_of_online_dpo_in_trl_1_16_have_the_accumulation_steps_as_a_factor(dumped):
    folder, expected = dumped
    cases = {name: case for name, case in expected.items() if name.startswith("online")}
    if not cases:
        pytest.skip("only TRL has online DPO")
    assert {name.rpartition("_")[2] for name in cases} == {"1", "2", "4"}
    for name, case in cases.items():
        for words in verdicts.files(folder / name, False):
            assert verdicts.expects(case, verdicts.verdict(words)), (name, verdicts.verdict(words))


def test_one_command_prints_the_versions_and_the_verdict_about_online_dpo():
    if not verdicts.python("trl").exists():
        pytest.skip(needs.TRL)
    command = [sys.executable, "-m", "tests.referee.verdicts", "trl", "online_sigmoid_1", "online_sigmoid_2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("trl ") and "torch " in first
    one, two = rest[:2]
    assert "online_sigmoid_1" in one and one.endswith("agrees")
    assert "online_sigmoid_2" in two and "factor 2" in two
    assert any(line.startswith("first wrong term: reduction") for line in rest)


def openrlhf(name: str) -> ModuleType:
    """Return a module of openrlhf.models; the others of the package need Ray."""
    folders = (ROOT / ".venv-audit").glob("lib/python*/site-packages/openrlhf/models")
    package = ModuleType("openrlhf_models")
    package.__path__ = [str(folder) for folder in folders]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.{name}")


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_losses_of_openrlhf_agree_with_its_settings(kind, estimator, tmp_path):
    if not verdicts.python("verl").exists():
        pytest.skip(needs.VERL)
    loss, utils = openrlhf("loss"), openrlhf("utils")
    hook = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "hooks" / "generic.py")))
    torch.manual_seed(0)
    rows, tokens, parts = 16, 12, 4
    mask = torch.arange(tokens) < torch.randint(2, tokens + 1, (rows, 1))
    log_probs = (-torch.rand(rows, tokens) - 0.1).requires_grad_()
    old, ref = (log_probs.detach() + (0.3 * torch.randn(rows, tokens)).clamp(max=0.1) for _ in range(2))
    rewards = torch.randn(rows // 4, 4)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-9)
    advantages = advantages.flatten()[:, None] * mask
    dump = hook.Dump(hook.OPENRLHF)
    settings = loss.PolicyLoss(clip_eps_low=0.2, clip_eps_high=0.3, dual_clip=3.0, policy_loss_type=kind)
    policy_loss = dump.wrap(settings.forward)
    info = {"dp_size": 1, "batch_num_tokens": mask.sum() / parts, "global_batch_size": rows / parts}
    for part in torch.arange(rows).chunk(parts):  # DeepSpeed divides by the parts after autograd
        now = log_probs[part]
        value, *_ = policy_loss(now, old[part], advantages[part], mask[part], **info)
        kl = utils.compute_approx_kl(now, ref[part], old[part], estimator)
        dump.note(ref_logprobs=ref[part])
        level = {"token_level_loss": settings.token_level_loss}
        (value + 0.05 * loss.aggregate_loss(kl, mask[part], **level, **info)).backward()
    claims = hook.claims(settings, "group_norm", kl_coef=0.05, kl=estimator)
    path = tmp_path / "step.safetensors"
    group = torch.arange(rows) // 4
    dump.finish(path, claims, later=1 / parts, rewards=rewards.flatten(), group=group)
    assert verdicts.verdict([str(path)]) == "agrees"
