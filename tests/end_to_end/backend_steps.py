"""Program of one rank in test_backends.py: executes training steps of backends on tiny models.

    python -m tests.end_to_end.backend_steps <device> <backends, comma-separated> <folder> [<other folder>]

The first rank writes the results of each backend to <folder>/<backend>.pt. The other folder has checkpoints
of a different number of ranks, from which every backend also resumes. Three ranks do nothing else.
"""

import contextlib
import os
import pickle
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.assembly.parts import part
from rlhf.config.algorithms import DistillConfig, DPOConfig, PairWeighting, PPOConfig
from rlhf.config.models import Dtype, LoRAConfig, ZeroConfig
from rlhf.config.run import ESSScaling, OptimConfig
from rlhf.config.schema import SCHEMAS
from rlhf.core.batch import Batch, Budget
from rlhf.engines.engine import Engine, EngineSettings, NonFinite, trained
from rlhf.models import divergence
from rlhf.models.forward import autocast, build_on_first, checkpoint_blocks, infer
from rlhf.models.modules import (
    ActorCritic,
    Policy,
    RewardModel,
    ServedCandidates,
    Teacher,
    ValueModel,
    adapt,
)
from rlhf.objectives.distill import Distill
from rlhf.objectives.dpo import OnlineDPO
from rlhf.objectives.objective import Objective
from rlhf.objectives.ppo import PPO
from rlhf.processes.ranks import Ranks
from rlhf.scorers.teacher import ServedTeacher
from tests.end_to_end.rank_runs import listening
from tests.served_teacher import MODEL, Reader
from tests.tiny_models import tiny_classifier, tiny_lm, tiny_rollouts, tiny_tokenizer

OBJECTIVES = {"dpo": OnlineDPO(DPOConfig()), "ppo": PPO(PPOConfig())}
ENTROPIC = PPO(PPOConfig(entropy_coef=0.1))
# The gradient of the keys' bias is 0 except for rounding errors, which differ between backends. With a small
# eps, Adam would turn these errors into full steps.
OPTIM = OptimConfig(lr=1e-2, eps=1e-4, max_grad_norm=0.5, ess_scaling=ESSScaling.sqrt)


READER = Reader(tiny_lm("llama"), tiny_tokenizer())


class Answered(ServedTeacher):
    """A served teacher without a server: the answers are those of a model in this process."""

    def post(self, question: Any, *_: Any) -> tuple[Any, str]:
        return READER.completion(question), ""


class Steps:
    """Steps of one backend.

    Three prompts do not divide evenly between two ranks, so one rank runs a padding micro-batch.
    """

    def __init__(self, name: str, ranks: Ranks, folder: Path) -> None:
        self.name = name
        self.ranks = ranks
        self.folder = folder / name
        config: Any = SCHEMAS[f"schema/backend/{name}"]()
        if name.startswith("zero3"):  # DeepSpeed's defaults would not divide such a small model
            small = {
                "stage3_param_persistence_threshold": 0,
                "stage3_max_reuse_distance": 0,
                "stage3_prefetch_bucket_size": 1000,
            }
            config.deepspeed = {"zero_optimization": small}
        self.config = config

    def engine(self, critic: bool = False, kind: str = "gpt_neox", **settings: Any) -> Engine:
        reference = tiny_lm(kind, **settings)
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=draw))

        def module() -> Any:
            policy = Policy(tiny_lm(kind, **settings), 0.7, shared_prefix=True)
            if not critic:
                return policy
            return ActorCritic(policy, ValueModel(tiny_classifier(kind), shared_prefix=True))

        return self.build(self.received(module), self.place(Policy(reference, 0.7, shared_prefix=True)))

    def received(self, build: Callable[[], Any]) -> Any:
        """Return the module that `build` returns; if weights are divided, ranks 1, ... get placeholders."""
        divided = self.config.footprint().gathered
        return build_on_first(build, self.ranks) if divided else build()

    def place(self, frozen: Any) -> Any:
        return part(self.config).place(self.config, self.received(lambda: frozen), self.ranks)

    def build(self, module: Any, reference: Policy | None, dtype: Dtype = Dtype.float32) -> Engine:
        engine: Engine = part(self.config).build(
            self.config,
            module=module,
            reference=reference,
            tokenizer=tiny_tokenizer(),
            ranks=self.ranks,
            settings=EngineSettings(
                optim=OPTIM,
                total_steps=10,
                steps_per_batch=1,
                budget=Budget(2),
                inference=Budget(2),
                dtype=dtype,
                value_lr=3e-2,
            ),
        )
        return engine

    def all(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: self.trained(name) for name in OBJECTIVES}
        found |= {
            "listening": listening(),
            "ran": self.ran(),
            "short": self.short(),
            "defaults": self.defaults(),
            "extras": {"dpo": self.extras(WeightedPairs()), "ppo": self.extras(ENTROPIC)},
            "bfloat16": self.bfloat16(),
            "frozen": self.frozen(),
            "left": self.left(),
            "distilled": self.distilled(),
        }
        if self.name in ("zero2", "zero3"):
            found["adapted"] = self.adapted()  # last, because it changes the config
        return found

    def trained(self, name: str) -> dict[str, Any]:
        """Run three updates, then the third update again from a checkpoint, then steps that fail."""
        objective = OBJECTIVES[name]
        engine = self.engine(critic=name == "ppo")
        batch = objective.credit(engine.annotate(scored(), objective.needs))
        rows = [figures(engine, batch, objective) for _ in range(2)]
        engine.save(self.folder / name)
        rows.append(figures(engine, batch, objective))
        return {
            "ref_logprobs": batch.ref_logprobs,
            "rows": rows,
            "weights": weights(engine),
            "kept": (numel(engine.module), numel(engine.reference)),
            "resumed": self.resumed(objective, self.folder / name),
            "failed": self.failed(objective, batch),
        }

    def resumed(self, objective: Objective, checkpoint: Path) -> dict[str, Any]:
        """Run the third update from the checkpoint that was saved after two updates."""
        engine = self.engine(critic=objective is OBJECTIVES["ppo"])
        # computed with the initial weights, as in `trained`
        batch = objective.credit(engine.annotate(scored(), objective.needs))
        engine.load(checkpoint)
        row = figures(engine, batch, objective)
        return {"row": row, "weights": weights(engine), "steps": engine.step_index}

    def failed(self, objective: Objective, batch: Batch) -> dict[str, Any]:
        """Run a step, two steps that fail (loss not finite; only gradient not finite), and another step."""
        engine = self.engine(critic=objective is OBJECTIVES["ppo"])
        figures(engine, batch, objective)
        before = weights(engine)
        said = []
        for broken in (BrokenLoss(objective), BrokenGradient(objective)):
            try:
                engine.step(batch, broken)
            except NonFinite as error:
                said.append((error.what, error.index))
        return {
            "said": said,
            "before": before,
            "after": weights(engine),
            "next": figures(engine, batch, objective),
            "end": weights(engine),
        }

    def ran(self) -> bool:
        """Return whether loading a checkpoint runs code that a file contains in place of tensors."""
        here = self.folder / "code"
        engine = self.engine()
        engine.save(here)
        proof = here / "proof"
        for file in here.rglob("*.pt"):
            torch.save({"module": Code(proof), "optimizer": Code(proof)}, file)
        for file in here.rglob(".metadata"):
            file.write_bytes(pickle.dumps(Code(proof)))
        with contextlib.suppress(Exception):
            engine.load(here)
        return proof.exists()

    def short(self) -> dict[str, Any]:
        """Run a step in which all prompts and responses of one rank's micro-batches have one token."""
        objective = OBJECTIVES["dpo"]
        engine = self.engine()
        batch = scored()
        mask = batch.response_mask.clone()
        mask[1:, :, 1:] = False
        prompts = batch.prompt_mask.clone()
        prompts[1:, :-1] = False
        batch = replace(batch, response_mask=mask, prompt_mask=prompts)
        batch = objective.credit(engine.annotate(batch, objective.needs))
        return {"rows": [figures(engine, batch, objective)], "weights": weights(engine)}

    def defaults(self) -> dict[str, Any]:
        """Run with DeepSpeed's defaults, with which small weights stay gathered after a forward pass."""
        steps = Steps(self.name, self.ranks, self.folder)
        if isinstance(steps.config, ZeroConfig):
            steps.config.deepspeed = {}
        objective = OBJECTIVES["dpo"]
        engine = steps.engine()
        batch = objective.credit(engine.annotate(scored(), objective.needs))
        rows = []
        for _ in range(2):
            engine.infer(engine.policy, batch, "logprobs")
            rows.append(figures(engine, batch, objective))
        return {"rows": rows, "weights": weights(engine)}

    def extras(self, objective: Objective) -> dict[str, Any]:
        """Run two updates of an objective that needs further outputs of the forward."""
        engine = self.engine(critic=objective is ENTROPIC)
        batch = objective.credit(engine.annotate(scored(), objective.needs))
        rows = [figures(engine, batch, objective) for _ in range(2)]
        return {"rows": rows, "weights": weights(engine)}

    def bfloat16(self) -> dict[str, Any]:
        objective = OBJECTIVES["dpo"]
        reference = self.place(Policy(tiny_lm(dtype=torch.bfloat16), 0.7, True))
        engine = self.build(Policy(tiny_lm(), 0.7, shared_prefix=True), reference, Dtype.bfloat16)
        batch = objective.credit(engine.annotate(scored(), objective.needs))
        with counted_gathers() as gathered:
            rows = [figures(engine, batch, objective) for _ in range(2)]
        kept = weights(engine)
        ids = torch.arange(2, 9, device=self.ranks.device)[None]
        with engine.borrow_policy() as model, torch.no_grad():
            logits = model(ids).logits
            whole = {str(parameter.dtype) for parameter in model.parameters()}
        model = tiny_lm().to(self.ranks.device)
        model.load_state_dict(kept)
        with autocast(self.ranks.device, Dtype.bfloat16), torch.no_grad():
            expected = model(ids).logits
        return {
            "rows": rows,
            "weights": kept,
            "gathered": dict(gathered),
            "borrowed": (sorted(whole), logits, expected),
            "reference": sorted({str(parameter.dtype) for parameter in reference.parameters()}),
            "logprobs": engine.infer(engine.policy, batch, "logprobs"),
        }

    def adapted(self) -> dict[str, Any]:
        """Train adapters with gradient checkpointing: sizes of the weights in and between the steps."""

        def module() -> Policy:
            policy = Policy(tiny_lm(num_hidden_layers=12), 0.7, shared_prefix=True)
            adapt(policy.model, LoRAConfig(rank=2), seed=1)
            checkpoint_blocks(policy.model)
            return policy

        if self.name.startswith("zero3"):  # by default, so small a model stays gathered until the step ends
            self.config.deepspeed["zero_optimization"]["stage3_max_live_parameters"] = 0
        engine = self.build(self.received(module), self.place(Policy(tiny_lm(), 0.7, shared_prefix=True)))
        batch = OBJECTIVES["dpo"].credit(engine.annotate(scored(), OBJECTIVES["dpo"].needs))
        own = list(engine.module.parameters())
        in_steps: list[int] = []  # whenever a part of the model runs, in the forward and in the recomputation
        for part_ in engine.module.modules():
            part_.register_forward_pre_hook(lambda *_: in_steps.append(sum(each.numel() for each in own)))
        between = []
        for _ in range(2):
            figures(engine, batch, OBJECTIVES["dpo"])
            between.append(numel(engine.module))
        return {"most": max(in_steps), "between": between, "all": numel(module())}

    def frozen(self) -> dict[str, Any]:
        """Run inference with models that are not trained: a reward model and a reference."""
        rollouts = tiny_rollouts(3, 2)
        model = self.place(RewardModel(tiny_classifier("llama"), shared_prefix=True))
        rewards = infer(model, rollouts, "rewards", Budget(2), self.ranks, Dtype.float32)
        reference = self.place(Policy(tiny_lm(), 0.7, shared_prefix=True))
        found = {
            temperature: infer(
                reference.at(temperature), rollouts, "logprobs", Budget(2), self.ranks, Dtype.float32
            )
            for temperature in (1.0, 0.7)
        }
        return {"rewards": rewards, "logprobs": found, "trained": trainable(model) + trainable(reference)}

    def distilled(self) -> dict[str, Any]:
        """Distil the reference, which is divided if the backend divides frozen models, in two updates.

        With adapters, the teacher is the policy without its adapters. The tiles are so small that ranks have
        different numbers of them.
        """
        divergence.CPU_TILE_BYTES = 1024

        def module() -> Policy:
            policy = Policy(tiny_lm("llama", tie_word_embeddings=False), 0.7, shared_prefix=True)
            adapt(policy.model, LoRAConfig(rank=2), seed=1)
            draw = torch.Generator().manual_seed(2)
            for parameter in trained(policy):
                torch.nn.init.normal_(parameter, std=0.1, generator=draw)
            return policy

        found = {}
        for name in ("another model", "tied", "adapters", "served"):
            adapted, config = name == "adapters", DistillConfig(beta=0.5)
            settings = {"kind": "llama", "tie_word_embeddings": True} if name == "tied" else {}
            engine = self.build(self.received(module), None) if adapted else self.engine(**settings)
            teacher = engine.policy.before_adapters() if adapted else engine.reference
            engine.policy.teacher = Teacher(teacher, beta=0.5, top=None)
            objective = Distill(config)
            if adapted:
                engine.reference = teacher
            if name == "served":
                config.top = 7
                engine.reference = Answered(config, MODEL, tiny_tokenizer())
                engine.reference.answered = True
                engine.policy.teacher = ServedCandidates(beta=0.5)
            batch = objective.credit(engine.annotate(scored(), objective.needs))
            rows = [figures(engine, batch, objective) for _ in range(2)]
            found[name] = {"rows": rows, "weights": weights(engine)}
        return found

    def left(self) -> dict[str, Any]:
        """Return weights, logits and the saved model of a policy without tied weights, of a policy with tied
        weights, and of a reward model.
        """
        found: dict[str, Any] = {}
        for kind, tied in (("gpt_neox", False), ("llama", True)):
            engine = self.engine(kind=kind, tie_word_embeddings=tied)
            folder = self.folder / kind
            with engine.borrow_policy() as model, torch.no_grad():
                for _ in range(1 + self.ranks.rank):  # decoding must not wait for other ranks
                    logits = model(torch.arange(2, 9, device=self.ranks.device)[None]).logits
            time.sleep(0.3 * self.ranks.rank)
            engine.save_model(folder)
            found[kind] = {
                "weights": weights(engine),
                "logits": logits,
                "saved": dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())
                if self.ranks.first
                else None,
                "tied": getattr(model, "lm_head", model).weight is model.get_input_embeddings().weight
                if tied
                else None,
            }
        engine = self.build(RewardModel(tiny_classifier(), shared_prefix=True), None)
        engine.save_model(self.folder / "reward")
        if self.ranks.first:
            saved = AutoModelForSequenceClassification.from_pretrained(self.folder / "reward")
            found["reward"] = {"weights": weights(engine), "saved": dict(saved.state_dict())}
        else:
            weights(engine)
        return found


class WeightedPairs(OnlineDPO):
    """Online DPO with the weights of WPO and an entropy bonus."""

    def __init__(self) -> None:
        super().__init__(DPOConfig(weighting=PairWeighting.wpo))
        self.needs |= {"entropy"}

    def loss(self, forward, batch: Batch):
        outputs = forward(batch)
        losses, stats = super().loss(lambda _: outputs, batch)
        return {"policy": losses["policy"] - 0.1 * outputs.entropy.sum()}, stats


class BrokenLoss(Objective):
    """An objective with a loss that is not a number."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.needs = objective.needs
        self.loss_weights = objective.loss_weights

    def credit(self, batch: Batch) -> Batch:
        return batch

    def count(self, batch: Batch):
        return self.objective.count(batch)

    def loss(self, forward, batch: Batch):
        losses, stats = self.objective.loss(forward, batch)
        return {name: self.broken(loss) for name, loss in losses.items()}, stats

    def broken(self, loss: Tensor) -> Tensor:
        return loss * torch.nan


class BrokenGradient(BrokenLoss):
    """An objective whose loss is finite and whose gradient is not finite."""

    def broken(self, loss: Tensor) -> Tensor:
        zero = 0.0 * loss
        return loss + zero.clamp(min=0).sqrt()  # the derivative of sqrt at 0 is infinite


class Code:
    """An object that, when unpickled, runs code: it creates the folder `proof`."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return os.makedirs, (str(self.proof),)


@contextlib.contextmanager
def counted_gathers() -> Iterator[Counter[str]]:
    """Count the numbers that ranks gather from one another at stage 3 within the block, by dtype."""
    from deepspeed.runtime.zero import partition_parameters

    gather, count = partition_parameters._dist_allgather_fn, Counter[str]()

    def counted(sent: Tensor, received: Tensor, group: Any = None) -> Any:
        count[str(sent.dtype)] += received.numel()
        return gather(sent, received, group)

    partition_parameters._dist_allgather_fn = counted
    try:
        yield count
    finally:
        partition_parameters._dist_allgather_fn = gather


def scored() -> Batch:
    rollouts = tiny_rollouts(3, 2)
    policy = Policy(tiny_lm(), 0.7, shared_prefix=True)
    sampled = infer(policy, rollouts, "logprobs", Budget(16), Ranks(), Dtype.float32)
    scores = torch.rand(3, 2, generator=torch.Generator().manual_seed(3))
    return replace(rollouts, behaviour_logprobs=sampled).extend(Batch, scores=scores)


def figures(engine: Engine, batch: Batch, objective: Objective) -> dict[str, float]:
    return {name: stat.value() for name, stat in engine.step(batch, objective).items()}


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}


def numel(module: torch.nn.Module | None) -> int:
    """Return the number of parameter values that a module has on this rank now."""
    return sum(parameter.numel() for parameter in module.parameters()) if module is not None else 0


def trainable(module: torch.nn.Module) -> int:
    return sum(parameter.requires_grad for parameter in module.parameters())


def main(device: str, backends: str, folder: Path, other: Path | None) -> None:
    ranks = Ranks.join(torch.device(device), 120.0)
    torch.set_num_threads(1)
    for name in backends.split(","):
        steps = Steps(name, ranks, folder)
        found = steps.all() if ranks.size < 3 else {}
        if other is not None:
            found["other ranks"] = {
                algo: steps.resumed(objective, other / name / algo) for algo, objective in OBJECTIVES.items()
            }
        if ranks.first:
            torch.save(found, folder / f"{name}.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]) if len(sys.argv) > 4 else None)
