"""Replay of a bundle, differences of two bundles, and a step of a bundle as a batch file or token by token.

A replay computes the update again, without data set, generator, reference and judge.

A bundle comes from others, so nothing in it is executed or fetched. Only settings that an update reads
are kept, models are read from safetensors, and the answers of judges come from the file. A setting that names
code or an address which the replay would use is refused, unless the caller trusts the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from pandas import DataFrame
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rlhf.assembly.models import build_device, quieten_libraries
from rlhf.assembly.parts import make
from rlhf.assembly.training import build_engine
from rlhf.config import algorithms as algos
from rlhf.config.generators import HFConfig
from rlhf.config.models import Device
from rlhf.config.root import Config
from rlhf.config.schema import content, data_file, plain, value_at
from rlhf.config.scorers import NoScorerConfig, judges, scorers
from rlhf.config.tasks import TaskConfig, TLDRMiniConfig
from rlhf.core.batch import Batch
from rlhf.core.errors import RunError, UserError, explained, one_line
from rlhf.core.formatting import printable, shortened
from rlhf.core.metrics import selected
from rlhf.core.state import TrainState
from rlhf.engines.engine import OPTIMIZER_FILE
from rlhf.models.loading import read_tokenizer
from rlhf.models.modules import ActorCritic
from rlhf.objectives.objective import old_or_behaviour, sampler_logprobs
from rlhf.objectives.topr import TOPR
from rlhf.processes.ranks import Ranks
from rlhf.referee.audit import Finding
from rlhf.referee.bundle import ANSWERS, Tape, bundle, digest, permitted, rescored, tensors_of, updates_of
from rlhf.referee.file import BatchFile, checked, read
from rlhf.runs.folder import RunFolder
from rlhf.terminal.console import console, show
from rlhf.trials.trials import choose_head, compile_blocks
from rlhf.words.compose import load_config

_CLAIMS: dict[str, Any] = data_file("rlhf.referee", "claims.yaml")
_THREADS = 512  # most threads of a replay, whatever the file says


def load(path: Path) -> BatchFile:
    """Read a bundle with all its tensors as they were written.

    Raises:
        UserError: the file is no bundle.
    """
    file = read(path)
    if file.header.get("kind") != "bundle":
        raise UserError(f"{path} must be a bundle, got a batch file; write one with: rlhf bundle <run>")
    return file


def malformed(error: Exception) -> UserError | None:
    """Explain an error of the content of a bundle: any number or text in it may be wrong."""
    if isinstance(error, UserError | RunError):
        return None
    got = shortened(one_line(error), 200)
    return UserError(f"the bundle must be one that rlhf.bundle of this version wrote, got {got}")


def unpack(file: BatchFile, folder: Path) -> None:
    """Write the files in a bundle below a folder.

    Raises:
        UserError: one would be outside of the folder, or is of a kind that could be executed.
    """
    for name, written in file.below("file").items():
        path = (folder / name).resolve()
        if folder.resolve() not in path.parents or not permitted(name):
            raise UserError(f"a bundle must contain files of models and judgements only, got {name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(written.numpy().tobytes())


def config_of(file: BatchFile, folder: Path) -> Config:
    """Return the config of a bundle without gold scorer, through a file in `folder`; nothing is resolved."""
    if "${" in (text := file.header["config"]):
        raise UserError("the config of a bundle must have values only, got an interpolation ${...}")
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    return load_config(folder / "config.yaml").with_({"gold": NoScorerConfig()})


def batch_in(file: BatchFile, *stages: str) -> Batch:
    """Return the batch of the tensors below a stage; those of later stages replace others."""
    none = [""] * len(file.tensors["batch/index"])
    values = {"texts": none, "references": none, **file.header["batch"]}
    for stage in stages:
        for name, x in file.below(stage).items():
            field, _, key = name.partition(".")
            values[field] = {**values.get(field, {}), key: x} if key else x
    return Batch(**values)


def refused(cfg: Config) -> Iterator[str]:
    """Yield a message for each setting that names code, or an address, which a replay would use."""
    kinds = {f"{at}.name": _CLAIMS["scorers"] for at, _ in scorers(cfg)}
    for key, accepted in {**_CLAIMS["replayed"], **kinds}.items():
        if (value := value_at(cfg, key)) not in accepted:
            rule = f"{key} must be {', '.join(map(plain, accepted))} (others name code or ask a service)"
            remedy = "add --only update, or --trust" if key in kinds else "add --trust"
            yield f"{rule}, got {plain(value)}; {remedy} if you trust the file"


def kept(cfg: Config, folder: Path, limits: list[int | None]) -> Config:
    """Return the config of a replay: models in `folder`, and no setting that an update does not read."""
    if cfg.backend.name != "torch":
        raise UserError(f"backend must be torch, whose state one process can load, got {cfg.backend.name}")
    used = ("algo", "model", "backend", "optim", "schedule", "stages", "scorer", "gold", "seed")
    sampler = {name: getattr(cfg.generator, name) for name in ("temperature", "response_length")}
    task: TaskConfig = TLDRMiniConfig()
    if names := cfg.task.shares:
        task = cfg.task.with_({"parts": dict.fromkeys(names, task), "weights": {}})
    start = str(folder / ("start" if cfg.model.lora.rank else "model"))
    reference = str(folder / "reference") if (folder / "reference").is_dir() else start
    changes: dict[str, Any] = {
        **{"model.base": start, "model.policy": start, "model.tokenizer": str(folder / "tokenizer")},
        **{"model.reference": reference, "model.reward": None, "model.chat_template": None},
        **{"backend.micro_batch": limits[0], "backend.tokens": limits[1], "backend.device": Device.auto},
    }
    if isinstance(cfg.algo, algos.PPOConfig):
        changes |= {"model.reward": str(folder / "critic"), "algo.value_from": algos.ValueFrom.reward}
    if cfg.algo.distils:
        changes["algo.teacher.token_variable"] = None
    for at, judge in judges(cfg).items():
        judge.token_variable = None
        for name in ("template", "rubric"):
            if getattr(judge, name) is not None:
                setattr(judge, name, str(folder / f"{at}.{name}"))
    same: dict[str, Any] = {name: getattr(cfg, name) for name in used}
    return Config(**same, generator=HFConfig(**sampler), task=task).with_(changes)


def replay(file: BatchFile, only: str = "", prompt: int | None = None, trust: bool = False) -> BatchFile:
    """Return what the update of a bundle computes in this process, in the form of a bundle.

    Args:
        file: the bundle.
        only: "rewards" or "update"; empty: both.
        prompt: the row of the only prompt whose rewards are computed, from 0; None: all.
        trust: whether settings of the bundle may name code and addresses.

    Raises:
        UserError: the bundle is malformed, lacks weights, texts or the prompt, or names what must be trusted.
    """
    quieten_libraries()
    head = file.header
    with TemporaryDirectory() as scratch, explained(malformed):
        folder = Path(scratch)
        unpack(file, folder)
        cfg, batch, tape = config_of(file, folder), batch_in(file, "batch"), Tape(folder)
        if prompt is not None and not 0 <= prompt < len(batch):
            raise UserError(f"--prompt must be from 1 to {len(batch)}, got {prompt + 1}")
        kinds = {each.name for _, each in scorers(cfg.scorer)}
        scores = only != "update" and "texts" in head["batch"] and not kinds & {"reward_model", "none"}
        if only == "rewards" and not scores:
            raise UserError("--only rewards needs texts and a scorer other than a reward model in the bundle")
        cfg = cfg if scores else cfg.with_({"scorer": NoScorerConfig()})
        if not trust and (found := [*refused(cfg)]):
            raise UserError(*found)
        cfg = kept(cfg, folder, head["limits"])
        torch.set_num_threads(min(int(head["machine"][-1]), _THREADS))
        tokenizer = read_tokenizer(str(folder / "tokenizer"), key="tokenizer")
        if only != "rewards":
            repeat(cfg, head, batch, tokenizer, tape)
        if scores:
            rows = batch if prompt is None else batch.select(torch.tensor([prompt]))
            again, _ = rescored(cfg, rows, tokenizer, folder / ANSWERS)
            new = {name: x for name, x in tensors_of(again).items() if name.startswith(("scores", "parts"))}
            tape.tensors |= {f"batch/{name}": x for name, x in new.items()}
        return BatchFile(tape.tensors, {"machine": head["machine"], **tape.header, "rewards": scores})


def repeat(
    cfg: Config, head: dict[str, Any], batch: Batch, tokenizer: PreTrainedTokenizerFast, tape: Tape
) -> None:
    """Compute the log-probs before the update, credit and optimizer steps again, and note them on `tape`."""
    if not (tape.folder / OPTIMIZER_FILE).exists():
        raise UserError("the bundle must have weights to repeat the update, got none; add --only rewards")
    num_updates, version = head["counters"]
    state = TrainState(num_updates=num_updates, update=head["step"] - 1)
    engine = build_engine(cfg, tokenizer, Ranks(build_device(cfg)), state)
    choose_head(engine, cfg)
    compile_blocks(engine, cfg, num_updates)
    engine.load(tape.folder)
    tape.before(engine)
    objective = make(cfg.algo)
    objective.load_state_dict(head["objective"])
    credited = tape.credit(objective, batch)
    if batch.old_logprobs is not None:
        tape.tensors["batch/old_logprobs"] = engine.infer(engine.policy, batch, "logprobs")
    if isinstance(engine.module, ActorCritic):
        tape.tensors["batch/values"] = engine.infer(engine.module.critic, batch, "values")
    plan = cfg.schedule
    for minibatch in credited.minibatches(plan.minibatches, plan.epochs, cfg.seed, state.update):
        tape.stepped(minibatch, engine.step(minibatch, objective))
    if engine.moving is not None:
        engine.moving(version + 1)
    tape.header["after"] = digest(engine)


# -- differences of two bundles, or of a bundle and its replay, in the order of the computation -----------

LOGPROBS, GRADIENTS = 1e-5, 1e-4  # bounds of rounding in float32: absolute; relative to the largest value
HALF = 1e3  # factor of these bounds with 16 bits
SHOWN = 8  # names of quantities after the first one


def quantities(a: BatchFile, b: BatchFile) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each quantity, and what two bundles have of it, in the order of the computation.

    A quantity is a tensor, a number, or a digest; None: a bundle does not have it.
    """
    yield "weights before the update", a.header.get("before"), b.header.get("before")
    order = [each.name for each in fields(Batch)]
    earlier: dict[str, Tensor] = {}
    for stage in ("batch", "credited"):
        mine, others = a.below(stage), b.below(stage)
        for name in sorted(mine | others, key=lambda name: (order.index(name.partition(".")[0]), name)):
            label = _CLAIMS["names"].get(name, name) + " of the trained responses" * (name in earlier)
            yield label, mine.get(name), others.get(name)
        earlier = mine | others
    both = zip_longest(a.header["steps"], b.header["steps"], fillvalue=dict[str, Any]())
    for at, (x, y) in enumerate(both, 1):
        mine, others = a.below(f"step{at}"), b.below(f"step{at}")
        for name in sorted(mine | others, key=lambda name: (name.endswith("_grads"), name != "rows", name)):
            yield f"step {at}: {name}", mine.get(name), others.get(name)
        for name in sorted(x | y):
            yield f"step {at}: {name}", x.get(name), y.get(name)
    yield "weights after the update", a.header.get("after"), b.header.get("after")


def differences(a: BatchFile, b: BatchFile, prompt: int | None = None, whole: bool = True) -> list[Finding]:
    """Return the quantities that differ, the first one first.

    The state is `rounding` if machine, libraries or numbers of threads differ, and rounding explains the
    difference; otherwise it is `differs`.

    Args:
        a, b: the bundles.
        prompt: the row of the only prompt that is compared; None: all.
        whole: whether a quantity that only one of them has is a difference; a replay computes only a part.
    """
    found: list[Finding] = []
    with explained(malformed):
        half = any(f"dtype: {kind}" in a.header["config"] for kind in ("bfloat16", "float16"))
        same = a.header.get("machine") == b.header.get("machine")
        for name, x, y in quantities(a, b):
            if x is not None and y is not None:
                if prompt is not None and isinstance(x, Tensor) and not name.endswith("rows"):
                    x, y = (each[prompt : prompt + 1] if len(each) > 1 else each for each in (x, y))
                found += compared(name, x, y, 0.0 if same else HALF if half else 1.0)
            elif whole and (x is not None or y is not None):
                found.append(Finding(name, "differs", f"only in the {'first' if y is None else 'second'}"))
    return found


def compared(name: str, x: Any, y: Any, wide: float) -> Iterator[Finding]:
    """Yield the difference of two tensors, numbers or digests, if there is one; two NaN are equal.

    The state is `rounding` if the difference is within the bounds of rounding, times `wide`.
    """
    if not isinstance(x, Tensor):
        if x != y and not (x != x and y != y):
            digests = isinstance(x, str)  # they do not say how much differs
            near = wide > 0 if digests else math.isclose(x, y, rel_tol=GRADIENTS * wide, abs_tol=1e-6 * wide)
            yield Finding(name, "rounding" if near else "differs", f"{x} and {y}")
        return
    if x.shape != y.shape or x.dtype != y.dtype:
        yield Finding(name, "differs", f"{x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)}")
        return
    x, y = x.double(), y.double()
    differ = (x != y) & ~(x.isnan() & y.isnan())
    if differ.any():
        names = ("prompt", "sample", "position", "candidate")
        place = zip(names, differ.nonzero()[0].tolist(), strict=False)
        where = ", ".join(f"{dim} {i + 1}" for dim, i in place)
        size = float((x - y).abs().nan_to_num(torch.inf).max())
        bound = GRADIENTS * float(x.abs().max()) if name.endswith("_grads") else LOGPROBS
        text = f"{int(differ.sum())} of {x.numel()} values, the first at {where}, by at most {size:.3g}"
        yield Finding(name, "rounding" if size <= wide * bound else "differs", text)


def report(found: Sequence[Finding], as_json: bool) -> int:
    """Print whether two bundles are the same, and the first difference; return the exit code, 0 or 1.

    Args:
        found: the differences.
        as_json: print a list of all differences.
    """
    within = all(each.state == "rounding" for each in found)
    if as_json:
        console.print_json(data=[asdict(each) for each in found])
    elif not found:
        show("same bits")
    else:
        show(f"first difference: {found[0].term}: {found[0].text}")
        more = f", and {len(found) - 1 - SHOWN} more" if len(found) > 1 + SHOWN else ""
        if others := ", ".join(each.term for each in found[1 : 1 + SHOWN]):
            show(f"then: {others}{more}")
        if within:
            show("same within rounding (the machines, libraries or numbers of threads differ)")
    return int(not within)


def bundles_of(runs: Sequence[RunFolder], folder: Path) -> tuple[int | None, list[Path]]:
    """Bundle the first update at which two runs differ, without weights.

    Returns:
        The number of the update (None: no row of metrics differs), and the bundles of both runs in `folder`.

    Raises:
        UserError: the runs have no update in common.
    """
    a, b = map(updates_of, runs)
    if not (both := sorted(a.keys() & b.keys())):
        raise UserError(f"{runs[0].path} and {runs[1].path} must have rows of the same updates, got none")
    first = next((update for update in both if a[update] != b[update]), None)
    if first is None:
        return None, []
    files = [folder / f"{name}.safetensors" for name in "ab"]
    for run, file in zip(runs, files, strict=True):
        bundle(run, first, file, weights=False)
    return first, files


# -- a step of a bundle: as a batch file with the settings of the run, and token by token -----------------

_FIELDS = ("response_mask", "response_ids", "environment_mask", "advantages", "old_logprobs", "ref_logprobs")


def batch_file(file: BatchFile, step: int = 1) -> BatchFile:
    """Return an optimizer step of a bundle, from 1, as a batch file whose claims are the settings of the run.

    Raises:
        UserError: the bundle has no such step, or the audit has no recipe for the algorithm.
    """
    with TemporaryDirectory() as scratch, explained(malformed):
        cfg, head = config_of(file, Path(scratch)), file.header
        if not 1 <= step <= len(head["steps"]):
            raise UserError(f"--step must be from 1 to {len(head['steps'])}, got {step}")
        algo, objective = cfg.algo, make(cfg.algo)
        objective.load_state_dict(head["objective"])
        claims = claimed(algo, objective, cfg.schedule.minibatches)
        whole, batch = batch_in(file, "batch"), batch_in(file, "batch", "credited")
        own, count = file.below(f"step{step}"), batch.response_ids.shape[1]
        rows = own.pop("rows")
        if batch.signal is not None and getattr(algo, "ties", None) is not algos.Ties.keep:
            rows = rows[batch.signal[rows]]  # the others are in no sum and no count
        part = batch.select(rows)
        found = {name: getattr(part, name) for name in _FIELDS} | {name: x[rows] for name, x in own.items()}
        now = found["logprobs"]
        if part.signal is not None:  # the model did not read the others
            now = torch.where(part.signal[:, None, None], now, old_or_behaviour(part))
        sampler = None if part.behaviour_logprobs is None else sampler_logprobs(now, part)
        found |= {"logprobs": now, "behaviour_logprobs": sampler}
        found |= {"old_values": part.values, "returns": part.returns, "value_mask": part.value_mask}
        found |= {"teacher_logprobs": part.ref_logprobs} if algo.distils else {}
        found |= own_tensors(objective, part, found)
        tensors = {name: x.flatten(0, 1) for name, x in found.items() if x is not None}
        tensors["losses"] = torch.tensor([head["steps"][step - 1]["loss/policy"]])
        entries = _CLAIMS["algorithms"][algo.name]
        if "policy_gradient" in entries:
            places = torch.arange(whole.episodes)
            index = places.view(-1, count)[rows].flatten()
            tensors |= {"all_rewards": objective.scores(whole).flatten(), "all_index": index}
            tensors |= {"all_group": places // count, "group": index // count}
        header = {name: head[name] for name in ("framework", "version", "pad_id", "eos_ids")}
        header |= {"claims": claims, "kind": "pairs" if "dpo" in entries else "policy_gradient"}
        header |= {"step": f"{head['step']}.{step}", "updates_since_old": step - 1}
        return checked(BatchFile(tensors, header, file.path))


def own_tensors(objective: Any, batch: Batch, found: dict[str, Any]) -> dict[str, Any]:
    """Return tensors of some algorithms: weights of the policy term, counted tokens, advantages of 1."""
    extra, mask = batch.per_token or {}, batch.response_mask
    if "weights" in extra:
        return {"weights": extra["weights"], "count_mask": extra["trained"]}
    if "reach" in extra:
        return {"weights": (extra["reach"] != 0).float()}
    if isinstance(objective, TOPR):
        log_u = objective.log_ratio(found["logprobs"] - found["behaviour_logprobs"], mask)
        weighted, _ = objective.surrogate(selected(log_u, mask), -mask.float(), batch)
        return {"weights": (weighted / found["advantages"]).nan_to_num(1.0)}
    return {"advantages": mask.float()} if batch.advantages is None else {}


def claimed(algo: Any, objective: Any, minibatches: int) -> dict[str, Any]:
    """Return the settings of an algorithm in the words of `claims`; claims.yaml has most of them.

    Raises:
        UserError: the audit has no recipe for them.
    """
    entries = _CLAIMS["algorithms"].get(algo.name, [])

    def read(key: str) -> Any:
        return content(value_at(algo, key), floats=False)

    def filled(claim: Any) -> Any:
        if isinstance(claim, list):
            return {key: getattr(algo, key) for key in claim}
        return read(claim[1:]) if str(claim).startswith("$") else claim

    known = {"name": [*_CLAIMS["algorithms"]]}
    for entry in entries:
        known |= _CLAIMS["known"].get(entry, {})
    for key, accepted in known.items():
        if read(key) not in accepted:
            raise UserError(f"the audit has no recipe for algo.{key}={read(key)} of algo={algo.name}")
    found: dict[str, Any] = {}
    for entry, when, claims in _CLAIMS["rules"]:
        if entry in entries and all(read(key) in accepted for key, accepted in when.items()):
            found |= {name: filled(claim) for name, claim in claims.items()}
    if "policy_gradient" in entries:
        found["kl_coef"] = objective.kl_coef
    for name, (key, factor, offset) in _CLAIMS["scaled"].get(algo.name, {}).items():
        found[name] = factor * read(key) + offset
    if "ppo" in entries and minibatches > 1:
        found["advantage"] = "given"  # whitened over the whole batch
    return found


def token_table(file: BatchFile, step: int, sample: int) -> DataFrame:
    """Return a table of the tokens of a response of an optimizer step, both from 1.

    Columns: token, mask (whether it is trained), log-probs of sampler and trainer and their difference,
    advantage, gradient by the log-prob, version of the weights that sampled, clipped (no gradient in spite of
    an advantage). The index is the position, from 1.

    Raises:
        UserError: the bundle has no such step or response.
    """
    with TemporaryDirectory() as scratch, explained(malformed):
        batch, own = batch_in(file, "batch", "credited"), file.below(f"step{step}")
        rows, count = own.get("rows", torch.zeros(0)).long(), batch.response_ids.shape[1]
        if not 1 <= sample <= len(rows) * count:
            raise UserError(f"--step {step} must have a response {sample}, got {len(rows) * count} responses")
        unpack(file, Path(scratch))
        tokenizer = read_tokenizer(str(Path(scratch) / "tokenizer"), key="tokenizer")
        row, k = int(rows[(sample - 1) // count]), (sample - 1) % count
        sampler, now, real = batch.behaviour_logprobs, own["logprobs"], batch.real[row, k]
        gap = None if sampler is None else now - sampler
        columns = {"token": batch.response_ids, "mask": batch.response_mask, "sampler": sampler}
        columns |= {"trainer": now, "mismatch": gap, "advantage": batch.advantages}
        columns |= {"gradient": own["logprob_grads"], "version": batch.token_versions}
        shown = {name: x[row, k][real].tolist() for name, x in columns.items() if x is not None}
        table = DataFrame(shown, index=(real.nonzero()[:, 0] + 1).tolist())
        table["token"] = [printable(str(tokenizer.decode([token]))) for token in shown["token"]]
        if batch.advantages is not None:
            table["clipped"] = (table["advantage"] != 0) & (table["gradient"] == 0)
        return table.rename_axis(f"prompt {row + 1}, sample {k + 1}")
