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
from enum import Enum
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rlhf.assembly.models import build_device, quieten_libraries
from rlhf.assembly.parts import make
from rlhf.assembly.training import build_engine
from rlhf.config import algorithms as algos
from rlhf.config.generators import HFConfig
from rlhf.config.models import Device
from rlhf.config.root import Config
from rlhf.config.schema import data_file, plain, sections, value_at, values
from rlhf.config.scorers import NoScorerConfig, judges, scorers
from rlhf.config.tasks import TaskConfig, TLDRMiniConfig
from rlhf.core.batch import Batch, batch_of, tensors_of
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
from rlhf.referee.bundle import Tape, bundle, digest, permitted, rescored, updates_of
from rlhf.referee.file import BatchFile, checked, read
from rlhf.runs.folder import RunFolder
from rlhf.terminal.console import console, show
from rlhf.trials.trials import choose_head, compile_blocks
from rlhf.words.compose import load_config

_CLAIMS: dict[str, Any] = data_file("rlhf.referee", "claims.yaml")
_THREADS = 512  # most threads of a replay, whatever the file says
# Any number or text of a bundle of others may be malformed, and no check knows all of them.
MALFORMED = (
    *(ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    *(UnpicklingError, SafetensorError),
)


def load(path: Path) -> BatchFile:
    """Read a bundle with all its tensors as they were written.

    Raises:
        UserError: the file is no bundle.
    """
    file = read(path)
    if file.header.get("kind") != "bundle":
        raise UserError(f"{path} must be a bundle, got a batch file; write one with: rlhf bundle <run>")
    return file


def row_of(file: BatchFile, prompt: int | None) -> int | None:
    """Return the row of a prompt, from 1, of the batch of a bundle.

    Raises:
        UserError: the batch has no such prompt.
    """
    count = len(file.tensors.get("batch/index", ()))
    if prompt is not None and not 1 <= prompt <= count:
        raise UserError(f"--prompt must be from 1 to {count}, got {prompt}")
    return None if prompt is None else prompt - 1


def malformed(error: Exception) -> UserError | None:
    """Explain an error of the content of a bundle."""
    if isinstance(error, UserError | RunError) or not isinstance(error, MALFORMED):
        return None
    got = shortened(one_line(error), 200)
    return UserError(f"the bundle must be one that rlhf.bundle of this version wrote, got {got}")


def unpack(file: BatchFile, folder: Path) -> None:
    """Write the files in a bundle below a folder.

    Raises:
        UserError: one would be outside of the folder, or is of a kind that could be executed.
    """
    for name, content in file.below("file").items():
        path = folder / name
        if not permitted(name):
            raise UserError(f"a bundle must contain files of models and judgements only, got {name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.numpy().tobytes())


def config_of(file: BatchFile, folder: Path) -> Config:
    """Return the config of a bundle, written to a folder; no interpolation is resolved."""
    if "${" in (text := file.header["config"]):
        raise UserError("the config of a bundle must have values only, got an interpolation ${...}")
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    return load_config(folder / "config.yaml")


def batch_in(file: BatchFile, *stages: str) -> Batch:
    """Return the batch of the tensors below a stage; those of later stages replace others."""
    tensors = {name: x for stage in stages for name, x in file.below(stage).items()}
    missing = dict.fromkeys(("texts", "references"), [""] * len(tensors.get("index", ())))
    return batch_of(tensors, {**missing, **file.header["batch"]})


def refused(cfg: Config, scores: bool) -> Iterator[str]:
    """Yield a message for each setting that names code, or an address, which a replay would use."""
    for key, accepted in _CLAIMS["replayed"].items():
        if (value := value_at(cfg, key)) not in accepted:
            yield f"{key} must be {', '.join(map(plain, accepted))} (others name code), got {plain(value)}"
    for at, each in scorers(cfg):
        if scores and at.startswith("scorer") and each.name not in _CLAIMS["scorers"]:
            rule = f"{at} must be {', '.join(_CLAIMS['scorers'])} (others run code or ask a service)"
            yield f"{rule}, got {each.name}: {each.described}; add --only update"


def kept(cfg: Config, folder: Path, limits: list[int | None], scores: bool) -> Config:
    """Return the config of a replay: models in `folder`, and no setting that an update does not read."""
    if cfg.backend.name != "torch":
        raise UserError(f"backend must be torch, whose state one process can load, got {cfg.backend.name}")
    used = ("algo", "model", "backend", "optim", "schedule", "stages", "scorer", "seed")
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
    if not scores:
        changes["scorer"] = NoScorerConfig()
    for at, judge in judges(cfg).items() if scores else ():
        if at.startswith("scorer"):
            texts = [name for name in ("template", "rubric") if getattr(judge, name) is not None]
            changes |= {f"{at}.{name}": str(folder / "judgements" / f"{at}.{name}") for name in texts}
            changes[f"{at}.token_variable"] = None
    same: dict[str, Any] = {name: getattr(cfg, name) for name in used}
    made = Config(**same, generator=HFConfig(**sampler), task=task, gold=NoScorerConfig()).with_(changes)
    if problems := [text for at, each in sections(made) for text in each.problems(at)]:
        raise UserError(*problems)
    return made


def replay(file: BatchFile, only: str = "", prompt: int | None = None, trust: bool = False) -> BatchFile:
    """Return what the update of a bundle computes in this process, in the form of a bundle.

    Args:
        file: the bundle.
        only: "rewards" or "update"; empty: both.
        prompt: the row of the only prompt whose rewards are computed; None: all.
        trust: whether settings of the bundle may name code and addresses.

    Raises:
        UserError: the bundle is malformed, lacks weights or texts, or names what must be trusted.
    """
    quieten_libraries()
    head = file.header
    with TemporaryDirectory() as scratch, explained(malformed):
        folder = Path(scratch)
        unpack(file, folder)
        cfg, batch, tape = config_of(file, folder), batch_in(file, "batch"), Tape(folder)
        kinds = {each.name for at, each in scorers(cfg) if at.startswith("scorer")}
        scores = only != "update" and "texts" in head["batch"] and not kinds & {"reward_model", "none"}
        if only == "rewards" and not scores:
            raise UserError("--only rewards needs texts and a scorer other than a reward model in the bundle")
        if not trust and (found := [*refused(cfg, scores)]):
            raise UserError(*(f"{each}; or add --trust if you trust the file" for each in found))
        cfg = kept(cfg, folder, head["limits"], scores)
        torch.set_num_threads(min(int(head["machine"][-1]), _THREADS))
        tokenizer = read_tokenizer(str(folder / "tokenizer"), key="tokenizer")
        if only != "rewards":
            repeat(cfg, head, batch, tokenizer, tape)
        if scores:
            rows = batch if prompt is None else batch.select(torch.tensor([prompt]))
            again, _ = rescored(cfg, rows, tokenizer, folder / "judgements" / "*.jsonl")
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


def quantities(file: BatchFile) -> Iterator[tuple[str, Any]]:
    """Yield the quantities of a bundle by name, in the order of the computation."""
    yield "weights before the update", file.header.get("before")
    order = {each.name: place for place, each in enumerate(fields(Batch))}
    for stage in ("batch", "credited"):
        found = file.below(stage)
        known = [(order[field], name) for name in found if (field := name.partition("/")[0]) in order]
        for _, name in sorted(known):
            again = stage == "credited" and f"batch/{name}" in file.tensors
            yield _CLAIMS["names"].get(name, name) + " of the trained responses" * again, found[name]
    for at, metrics in enumerate(file.header["steps"], 1):
        own = file.below(f"step{at}")
        for name in sorted(own, key=lambda name: (name.endswith("_grads"), name != "rows", name)):
            yield f"step {at}: {name}", own[name]
        rank = {name: (not name.startswith("loss/"), "grad_norm" not in name, name) for name in metrics}
        for name in sorted(metrics, key=lambda name: rank[name]):
            yield f"step {at}: {name}", metrics[name]
    yield "weights after the update", file.header.get("after")


def differences(a: BatchFile, b: BatchFile, prompt: int | None = None, whole: bool = True) -> list[Finding]:
    """Return the quantities that differ, the first one first; the state is rounding or differs.

    Args:
        a, b: the bundles.
        prompt: the row of the only prompt that is compared; None: all.
        whole: whether a quantity that only one of them has is a difference; a replay computes only a part.
    """
    found: list[Finding] = []
    with explained(malformed):
        both = zip_longest(a.header["steps"], b.header["steps"], fillvalue=dict[str, Any]())
        steps = [{**one, **other} for one, other in both]
        order = quantities(BatchFile({**a.tensors, **b.tensors}, {**a.header, "steps": steps}))
        mine, others = dict(quantities(a)), dict(quantities(b))
        half = any(f"dtype: {kind}" in a.header["config"] for kind in ("bfloat16", "float16"))
        for name, _ in order:
            x, y = mine.get(name), others.get(name)
            if x is not None and y is not None:
                if prompt is not None and isinstance(x, Tensor) and not name.endswith("rows"):
                    x, y = (each[prompt : prompt + 1] if len(each) > 1 else each for each in (x, y))
                found += compared(name, x, y, HALF if half else 1.0)
            elif whole:
                only = "first" if y is None else "second"
                found.append(Finding(name, "differs", f"only in the {only}"))
    return found


def compared(name: str, x: Any, y: Any, wide: float) -> Iterator[Finding]:
    """Yield the difference of two tensors, numbers or digests, if there is one; two NaN are equal.

    The state is `rounding` if the rounding of another machine explains the difference.
    """
    if not isinstance(x, Tensor):
        if x != y and not (x != x and y != y):
            near = isinstance(x, str) or math.isclose(x, y, rel_tol=GRADIENTS * wide, abs_tol=1e-6 * wide)
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


def report(found: Sequence[Finding], elsewhere: bool, as_json: bool) -> int:
    """Print whether two bundles are the same, and the first difference; return the exit code, 0 or 1.

    Args:
        found: the differences.
        elsewhere: whether machine, libraries or numbers of threads differ, so that rounding may differ.
        as_json: print a list of all differences.
    """
    within = elsewhere and all(each.state == "rounding" for each in found)
    if as_json:
        state = "rounding" if within else "differs"
        console.print_json(data=[{**asdict(each), "state": state} for each in found])
    elif not found:
        show("same bits")
    else:
        show(f"first difference: {found[0].term}: {found[0].text}")
        more = f", and {len(found) - 1 - SHOWN} more" if len(found) > 1 + SHOWN else ""
        if others := ", ".join(each.term for each in found[1 : 1 + SHOWN]):
            show(f"then: {others}{more}")
        if within:
            show("same within rounding (the machines, libraries or numbers of threads differ)")
    return int(bool(found) and not within)


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
        rows, count = file.tensors[f"step{step}/rows"], batch.response_ids.shape[1]
        if batch.signal is not None and getattr(algo, "ties", None) is not algos.Ties.keep:
            rows = rows[batch.signal[rows]]  # the others are in no sum and no count
        part = batch.select(rows)
        found = {name: getattr(part, name) for name in _FIELDS}
        found |= {name: x[rows] for name, x in file.below(f"step{step}").items() if name != "rows"}
        now = found["logprobs"]
        if part.signal is not None:  # the model did not read the others
            now = torch.where(part.signal[:, None, None], now, old_or_behaviour(part))
        sampler = None if part.behaviour_logprobs is None else sampler_logprobs(now, part)
        found |= {"logprobs": now, "behaviour_logprobs": sampler}
        found |= {"old_values": part.values, "returns": part.returns, "value_mask": part.value_mask}
        found |= own_tensors(objective, part, found)
        found |= {"teacher_logprobs": part.ref_logprobs} if algo.distils else {}
        tensors = {name: x.flatten(0, 1) for name, x in found.items() if x is not None}
        tensors["losses"] = torch.tensor([head["steps"][step - 1]["loss/policy"]])
        header = {"framework": "rlhf", "version": head["version"], "step": f"{head['step']}.{step}"}
        entries = _CLAIMS["algorithms"][algo.name]
        header |= {"claims": claims, "kind": "pairs" if "dpo" in entries else "policy_gradient"}
        if "policy_gradient" in entries:
            places = torch.arange(len(whole) * count).view(-1, count)
            tensors |= {"group": rows.repeat_interleave(count), "all_index": places[rows].flatten()}
            tensors |= {
                "all_rewards": objective.scores(whole).flatten(),
                "all_group": places.flatten() // count,
            }
            header["updates_since_old"] = step - 1
        return checked(BatchFile(tensors, header, file.path))


def own_tensors(objective: Any, batch: Batch, found: dict[str, Any]) -> dict[str, Any]:
    """Return tensors of some algorithms: weights of the policy term, counted tokens, advantages of 1."""
    extra, mask = batch.per_token or {}, batch.response_mask
    if "weights" in extra:
        counted = extra.get("trained", mask)
        return {"weights": torch.where(counted, extra["weights"], 0.0), "count_mask": counted}
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
        value = value_at(algo, key)
        return value.value if isinstance(value, Enum) else value

    known = (pair for entry in entries for pair in _CLAIMS["known"].get(entry, {}).items())
    unknown = [key for key, accepted in known if read(key) not in accepted]
    for key in unknown if entries else ["name"]:
        raise UserError(f"the audit has no recipe for algo.{key}={read(key)} of algo={algo.name}")
    found: dict[str, Any] = {}
    for entry in entries:
        found |= {name: read(key) for name, key in _CLAIMS["fields"].get(entry, {}).items()}
        found |= _CLAIMS["values"].get(entry, {})
    for entry, when, claims in _CLAIMS["rules"]:
        if entry in entries and all(read(key) in accepted for key, accepted in when.items()):
            found |= claims
    if "policy_gradient" in entries:
        found["kl_coef"] = objective.kl_coef
        if algo.correction.kind is not algos.CorrectionKind.none:
            found["correction"] = {key: read(f"correction.{key}") for key in values(algo.correction)}
    for name, (key, factor, offset) in _CLAIMS["scaled"].get(algo.name, {}).items():
        found[name] = factor * read(key) + offset
    if "ppo" in entries and minibatches > 1:
        found["advantage"] = "given"  # whitened over the whole batch
    if algo.name in _CLAIMS["options"]:
        found["options"] = {name: getattr(algo, name) for name in _CLAIMS["options"][algo.name]}
    return found


def token_table(file: BatchFile, step: int, sample: int) -> Table:
    """Return a table of the tokens of a response of an optimizer step, both from 1.

    Columns: text, whether it is trained, log-probs of sampler and trainer and their difference, advantage,
    gradient by the log-prob, whether the loss is clipped (no gradient in spite of an advantage), version.

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
        now, gradient = own["logprobs"], own["logprob_grads"]
        sampler = batch.behaviour_logprobs
        columns = {"sampler": sampler, "trainer": now, "mismatch": None if sampler is None else now - sampler}
        columns |= {"advantage": batch.advantages, "gradient": gradient, "version": batch.token_versions}
        shown = {name: x[row, k].tolist() for name, x in columns.items() if x is not None}
        table = Table("#", "token", "mask", *shown, "clip", title=f"prompt {row + 1}, sample {k + 1}")
        for place in batch.real[row, k].nonzero()[:, 0].tolist():
            text = Text(printable(str(tokenizer.decode([int(batch.response_ids[row, k, place])]))))
            numbers = [f"{x[place]:.4g}" for x in shown.values()]
            clipped = shown.get("advantage", [0.0] * (place + 1))[place] and not shown["gradient"][place]
            trained = "yes" if batch.response_mask[row, k, place] else "no"
            table.add_row(str(place + 1), text, trained, *numbers, "clipped" if clipped else "")
        return table


def as_page(table: Table) -> str:
    """Return a page of HTML with a table, which loads no other file; texts are escaped."""
    console = Console(record=True, file=StringIO(), width=160)
    console.print(table)
    return console.export_html()
