"""Program of one rank in test_fsdp2.py: steps of `backend=fsdp2` on tiny models.

    python -m tests.end_to_end.fsdp2_steps <folder> <file of results>

Two ranks run every algorithm, and write checkpoints of every model to the folder. Every number of ranks
resumes from these checkpoints. The first rank writes the results.
"""

import contextlib
import resource
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from rlhf.assembly.parts import make
from rlhf.config.algorithms import AlgoConfig, Trains
from rlhf.config.models import Dtype, FSDP2Config, LoRAConfig
from rlhf.config.run import OptimConfig
from rlhf.config.schema import SCHEMAS
from rlhf.core.batch import Batch, Budget
from rlhf.engines.engine import Engine, EngineSettings, TorchEngine, trained
from rlhf.engines.fsdp2_engine import FSDP2Engine
from rlhf.models.forward import NoSharedPrefix, build_on_first, checkpoint_blocks, infer
from rlhf.models.modules import (
    ActorCritic,
    Policy,
    RewardModel,
    Teacher,
    ValueModel,
    adapt,
    load_adapter,
    whole_weights,
)
from rlhf.objectives.objective import Objective
from rlhf.processes.ranks import ALONE, Ranks
from rlhf.scorers.teacher import ServedTeacher
from tests.end_to_end.backend_steps import figures, weights
from tests.engines.test_weight_copies import Casts
from tests.tiny_models import KINDS, tiny_classifier, tiny_lm, tiny_rollouts, tiny_tokenizer

ALGORITHMS = sorted(name.removeprefix("schema/algo/") for name in SCHEMAS if name.startswith("schema/algo/"))
MODELS: dict[str, dict[str, Any]] = {
    "gpt_neox": {"kind": "gpt_neox"},
    "llama": {"kind": "llama"},
    "tied qwen2": {"kind": "qwen2", "tie_word_embeddings": True},
    "adapters": {"kind": "llama", "lora": True},
    "adapters, bfloat16": {"kind": "llama", "lora": True, "dtype": torch.bfloat16},
    "gradient checkpointing": {"kind": "gpt_neox", "checkpointing": True},
    "value model": {"kind": "gpt_neox", "critic": True},
    "plain prompts": {"kind": "qwen2", "shared_prefix": False},
    "unshareable": {  # found out by a forward that fails
        "kind": "qwen2",
        **{"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    },
}
RESHARDED = ("gpt_neox", "llama", "tied qwen2", "adapters")  # also resumed on another number of ranks
DEEP = {"num_hidden_layers": 24}  # for the measurement of memory


def module(
    kind: str,
    lora: bool = False,
    critic: bool = False,
    checkpointing: bool = False,
    reward: bool = False,
    shared_prefix: bool = True,
    **settings: Any,
) -> Any:
    if reward:
        return RewardModel(tiny_classifier(kind), shared_prefix)
    policy = Policy(tiny_lm(kind, **settings), 0.7, shared_prefix)
    if lora:
        adapt(policy.model, LoRAConfig(rank=4), seed=5)
        draw = torch.Generator().manual_seed(6)
        for parameter in trained(policy):
            torch.nn.init.normal_(parameter, std=0.02, generator=draw)
    if checkpointing:
        checkpoint_blocks(policy.model)
    return ActorCritic(policy, ValueModel(tiny_classifier(kind), shared_prefix)) if critic else policy


def reference(kind: str) -> Policy:
    model, draw = tiny_lm(kind), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=draw))
    return Policy(model, 0.7, shared_prefix=True)


def engine_of(
    kind: str, ranks: Ranks | None, lora: bool = False, served: ServedTeacher | None = None, **model: Any
) -> Engine:
    """Return an engine on the ranks with FSDP2, or, without ranks, on plain torch in this process."""
    compares = not lora and not served and not model.get("reward")
    # The gradient of the keys' bias is 0 except for rounding errors: with a small eps, these are full steps.
    optim = OptimConfig(lr=1e-2, eps=1e-4, max_grad_norm=0.5)
    dtype = Dtype.bfloat16 if "dtype" in model else Dtype.float32
    limits = {"budget": Budget(4), "inference": Budget(8), "total_steps": 10, "steps_per_batch": 2}
    settings = EngineSettings(optim=optim, dtype=dtype, **limits)
    build: Callable[[], Any] = lambda: module(kind, lora=lora, **model)  # noqa: E731
    other = (lambda: reference(kind)) if compares else None
    tokenizer = tiny_tokenizer()
    if ranks is None:
        frozen = TorchEngine.place(None, other(), ALONE) if other else None
        engine: Engine = TorchEngine(build(), frozen, tokenizer, ALONE, settings)
    else:
        config = FSDP2Config()
        FSDP2Engine.prepare(config, dtype, ranks)
        frozen = FSDP2Engine.place(config, build_on_first(other, ranks), ranks) if other else None
        engine = FSDP2Engine(build_on_first(build, ranks), frozen or served, tokenizer, ranks, settings)
    if "use_sliding_window" in model:
        for policy in filter(None, (engine.policy, engine.reference)):
            with contextlib.suppress(NoSharedPrefix):
                policy(tiny_rollouts(1, 2))
            policy.shared_prefix = False
    if lora:
        engine.reference = engine.policy.before_adapters()
    return engine


def batch_of(config: AlgoConfig) -> Batch:
    samples = config.samples_per_prompt
    rollouts = tiny_rollouts(6, samples)
    sampler = Policy(tiny_lm("gpt_neox"), 0.7, shared_prefix=True)
    sampled = infer(sampler, rollouts, "logprobs", Budget(16), ALONE, Dtype.float32)
    scores = torch.rand(6, samples, generator=torch.Generator().manual_seed(3))
    return replace(rollouts, behaviour_logprobs=sampled).extend(Batch, scores=scores)


def given(engine: Engine, objective: Objective, batch: Batch) -> Batch:
    return objective.credit(engine.annotate(batch, objective.needs))


def algorithm(name: str, number: int, ranks: Ranks) -> dict[str, Any]:
    """Run the first step of an algorithm with FSDP2, and on plain torch on the first rank."""
    config = SCHEMAS[f"schema/algo/{name}"]()
    objective, batch = make(config), batch_of(config)
    kind = KINDS[number % len(KINDS)]
    model = {"critic": "values" in objective.needs, "reward": config.trains is Trains.reward}

    def first(where: Ranks | None) -> dict[str, float]:
        engine = engine_of(kind, where, **model)
        if "divergence" in objective.needs:
            assert engine.reference is not None
            engine.policy.teacher = Teacher(engine.reference, config.beta, config.top)
        return figures(engine, given(engine, objective, batch), objective)

    return {"fsdp2": first(ranks), "torch": first(None) if ranks.first else {}}


GRPO = SCHEMAS["schema/algo/grpo"]
PPO = SCHEMAS["schema/algo/ppo"]


def parts(name: str) -> tuple[Objective, Batch]:
    config = PPO() if "value" in name else GRPO(samples_per_prompt=2)
    return make(config), batch_of(config)


def resumed(name: str, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Run the third step from the checkpoint that two ranks wrote after the second step."""
    objective, batch = parts(name)
    engine = engine_of(ranks=ranks, **MODELS[name])
    batch = given(engine, objective, batch)
    engine.load(folder / name)
    return {"row": figures(engine, batch, objective), "weights": weights(engine), "step": engine.step_index}


def model(name: str, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Run three steps, with a checkpoint after the second step."""
    objective, batch = parts(name)
    engine = engine_of(ranks=ranks, **MODELS[name])
    batch = given(engine, objective, batch)
    rows = [figures(engine, batch, objective) for _ in range(2)]
    engine.save(folder / name)
    left = exported(engine, folder / f"{name} exported", ranks)
    engine.infer(engine.policy, batch, "logprobs")  # directly before a step
    rows.append(figures(engine, batch, objective))
    numbers = [sum(each.numel() for each in engine.module.parameters())]
    numbers.append(sum(local(each).numel() for each in engine.module.parameters()))
    found = {"rows": rows, "weights": weights(engine), "numbers": numbers, "left": left}
    if ranks.first:
        alone = engine_of(ranks=None, **MODELS[name])
        batch = given(alone, objective, parts(name)[1])
        found["torch"] = {
            "rows": [figures(alone, batch, objective) for _ in range(3)],
            "weights": weights(alone),
        }
    return found


def exported(engine: Engine, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Return what the engine gives away, and what plain torch gives away with the same weights."""
    own, ids = weights(engine), torch.arange(2, 9)[None]
    engine.save_model(folder / "model")
    engine.save_adapter(folder / "adapter")
    with engine.borrow_policy() as lent, torch.no_grad():
        logits = lent(ids).logits
    if not ranks.first:
        return {}
    saved = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        plain: dict[str, Any] = {"logits": saved(ids).logits}
    found = {"weights": own, "saved": dict(saved.state_dict()), "logits": logits, "plain": plain}
    if (folder / "adapter").exists():
        adapted = module("llama", lora=True, dtype=engine.module.model.dtype).model
        load_adapter(adapted, folder / "adapter")
        plain["weights"] = {each: tensor.clone() for each, tensor in whole_weights(adapted)}
    return found


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_disk(folder: Path, ranks: Ranks) -> list[str]:
    """Save while the second rank cannot write a file of 1 KiB; return each rank's error, and save again."""
    engine = engine_of("llama", ranks)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not ranks.first:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    said = ""
    try:
        engine.save(folder / "full")
    except (OSError, RuntimeError) as error:  # of the system, or of torch's writer
        said = type(error).__name__
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    engine.save(folder / "full")
    found: list[str] = ranks.gather(said)  # each rank has written its part before one reads all of them
    engine.load(folder / "full")
    return found


def served(ranks: Ranks) -> dict[str, float]:
    """Make a step with a teacher that a server runs, and whose log-probs have arrived."""
    config = SCHEMAS["schema/algo/distill"](divergence="k1", samples_per_prompt=2)
    config.teacher.url = "http://127.0.0.1:1"
    teacher = ServedTeacher(config, "teacher", tiny_tokenizer())
    engine, batch = engine_of("llama", ranks, served=teacher), batch_of(config)
    objective = make(config)
    return figures(
        engine, given(engine, objective, replace(batch, ref_logprobs=batch.behaviour_logprobs)), objective
    )


def copies(ranks: Ranks) -> list[int]:
    """Return how often forwards without gradients round weights to bfloat16: with 3 micro-batches, with 1."""
    engine, counts = engine_of("llama", ranks), []
    engine.settings = replace(engine.settings, dtype=Dtype.bfloat16)
    for prompts in (24, 8):
        with Casts() as casts:
            engine.infer(engine.policy, tiny_rollouts(prompts, 2), "logprobs")
        counts.append(casts.count)
    return counts


def memory(ranks: Ranks) -> dict[str, Any]:
    """Return the most bytes of weights, gradients and optimizer state of a rank, with and without sharing."""
    objective, batch = parts("llama")
    found = {}
    for shared in (True, False):
        engine = engine_of("gpt_neox", ranks, shared_prefix=shared, **DEEP)
        batch = given(engine, objective, batch)
        assert isinstance(engine, FSDP2Engine)
        most, own = 0, engine.parameters()
        held = sum(local(each).nbytes for each in own.values())
        states = [each for state in engine.optimizer.state.values() for each in state.values() if each.ndim]
        held += sum(local(each).nbytes for each in states)

        def look(*_: Any, engine: Engine = engine, own: dict[str, Any] = own, shared: bool = shared) -> None:
            """Add gathered weights, with their gradients that wait for a second use, and summed gradients."""
            nonlocal most
            whole = [each for each in engine.module.parameters() if not isinstance(each, DTensor)]
            gathered = sum((1 + shared) * each.untyped_storage().nbytes() for each in whole)
            summed = [each.grad for each in own.values() if each.grad is not None]
            most = max(most, gathered + sum(local(each).nbytes for each in summed))

        for block in engine.policy.model.base_model.layers:
            block.register_full_backward_hook(look)
        for each in own.values():
            each.register_post_accumulate_grad_hook(look)
        figures(engine, batch, objective)
        found[shared] = held + most
    return found


def main(folder: Path, results: Path) -> None:
    ranks = Ranks.join(torch.device("cpu"), 120.0)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as said:
        if ranks.size == 2:
            found["algorithms"] = {
                name: algorithm(name, number, ranks) for number, name in enumerate(ALGORITHMS)
            }
            found["models"] = {name: model(name, folder, ranks) for name in MODELS}
            found["full disk"] = full_disk(folder, ranks)
            found["served teacher"] = served(ranks)
            found["copies"] = copies(ranks)
            found["memory"] = memory(ranks)
        chosen = MODELS if ranks.size == 2 else RESHARDED
        found["resumed"] = {name: resumed(name, folder, ranks) for name in chosen}
    found["warnings"] = [str(each.message) for each in said]
    if ranks.first:
        torch.save(found, results)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]), Path(sys.argv[2]))
