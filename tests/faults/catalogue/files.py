"""Files of run folders and of `cache_dir` that are removed, damaged or replaced."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf.core.files import discard
from tests.faults.catalogue.damages import (
    STRAYS,
    all_checkpoints,
    cut_line,
    empty,
    flip,
    folder_instead,
    garbage,
    missing_line,
    on,
    remove,
    rename,
    repeated_line,
    state_with,
    truncate,
    write_protect,
    zero,
)
from tests.faults.catalogue.signals import ANY
from tests.faults.entry import LOAD, Act, Entry, Moment, Outcome, codes
from tests.faults.trial import Trial

# -- run folders between two sessions --------------------------------------------------------------

ROWS = "`metrics.jsonl` or `completions.jsonl`"
RESUMES = Outcome(codes(0))


def names(path: str) -> Outcome:
    """Return the outcome: resumes with the right results, or exit code 2 with the name of the file."""
    return Outcome(codes(0, _2=path), same=False)


def between() -> Iterator[Entry]:
    """Yield the entries of damages in the folder of a crashed run."""
    part = "Resumed run"
    usual = {"remove": remove, "truncate": truncate, "zero": zero, "flip": flip, "rename": rename}
    usual |= {"empty": empty, "garbage": garbage}
    lines = {"cut_line": cut_line, "missing_line": missing_line, "repeated_line": repeated_line}
    for name in ("metrics.jsonl", "completions.jsonl"):
        for kind, damage in (usual | lines).items():
            yield Entry(
                f"{kind}.{name}",
                f"{part}: {ROWS} removed, cut, zeroed, altered, with missing or repeated lines",
                "lag" if kind in ("remove", "truncate") else "hf",
                on(name, damage),
                RESUMES,
                begin="crashed",
            )
    for kind, damage in usual.items():
        if kind not in ("flip", "truncate"):
            yield Entry(
                f"{kind}.config",
                f"{part}: `config.yaml` removed, emptied or replaced by random bytes",
                "hf",
                on("config.yaml", damage),
                RESUMES,
                begin="crashed",
            )
        yield Entry(
            f"{kind}.log",
            f"{part}: `train.log`, `environment.json` or `generator.log` removed, cut or altered",
            "lag",
            on(*{"remove": ("train.log", damage), "flip": ("environment.json", damage)}.get(
                kind, ("generator.log", damage) if kind not in ("truncate", "flip") else ("train.log", damage)
            )),
            RESUMES,
            begin="crashed",
        )  # fmt: skip
    for name in ("metrics.jsonl", "completions.jsonl", "train.log", "config.yaml", "environment.json"):
        yield Entry(
            f"folder.{name}",
            f"{part}: a folder in place of a file, or a read-only file",
            "hf",
            on(name, folder_instead),
            Outcome(codes(0, _1=name, _2=name), same=False),
            begin="crashed",
        )
    for kind, text in {
        "null": "null",
        "list": "[]",
        "finished": '{"finished": true}',
        "cut": '{"update": 3, "epi',
        "empty": "",
    }.items():
        yield Entry(
            f"state_{kind}",
            f"{part}: `trainer_state.json` with other content",
            "hf",
            state_with(text),
            names("trainer_state.json"),
            begin="crashed",
        )
    for pattern, damages in {
        "checkpoint/COMPLETE": usual,
        "checkpoint/model/model.safetensors": {k: usual[k] for k in ("truncate", "flip", "zero", "remove")},
        "checkpoint/optimizer.pt": {k: usual[k] for k in ("truncate", "flip", "rename")},
        "checkpoint/counters.json": {k: usual[k] for k in ("flip", "empty", "remove")},
        "checkpoint/random.pt": {k: usual[k] for k in ("zero", "remove")},
        "checkpoint/in_flight.pt": {k: usual[k] for k in ("flip", "truncate")},
        "checkpoint/model/config.json": {k: usual[k] for k in ("flip", "remove")},
        "checkpoint/": {k: usual[k] for k in ("remove", "rename")},
    }.items():
        for kind, damage in damages.items():
            short = pattern.strip("/").rpartition("/")[2]
            yield Entry(
                f"{kind}.checkpoint.{short}",
                f"{part}: a checkpoint removed, renamed, or one of its files damaged",
                "lag" if short == "in_flight.pt" else "hf",
                on(pattern, damage),
                Outcome(codes(0)),
                begin="crashed",
            )
    yield Entry(
        "flip.all_checkpoints",
        f"{part}: all checkpoints damaged",
        "hf",
        all_checkpoints,
        Outcome(codes(0)),
        begin="crashed",
    )
    for run in ("zero2", "ranks"):
        yield Entry(
            f"flip.checkpoint.{run}",
            f"{part}: a checkpoint removed, renamed, or one of its files damaged",
            run,
            on("checkpoint/**/*.pt", flip),
            Outcome(codes(0)),
            begin="crashed",
            needs="deepspeed" if run == "zero2" else "",
        )
    for run in ("ppo", "lora", "reward", "sft"):
        yield Entry(
            f"flip.checkpoint.{run}",
            f"{part}: a checkpoint removed, renamed, or one of its files damaged",
            run,
            on("checkpoint/**/*.*", flip),
            Outcome(codes(0)),
            begin="crashed",
        )
    for kind, stray in STRAYS.items():
        yield Entry(
            f"stray.{kind}",
            f"{part}: unrelated files, folders and links beside the files of the run",
            "hf",
            stray,
            RESUMES,
            begin="crashed",
        )
    yield Entry(
        "read_only.metrics",
        f"{part}: a folder in place of a file, or a read-only file",
        "hf",
        on("*.json*", write_protect),
        Outcome(codes(0, _1="annot write|ermission", _2="annot|ermission"), same=False),
        begin="crashed",
    )


# -- run folders during a session ------------------------------------------------------------------


def during() -> Iterator[Entry]:
    """Yield the entries of damages in the folder of an active run."""
    part = "Active run"
    gone = Outcome(codes(0, _1="out/"), reported="removed|missing|lost|deleted|no longer")
    for name, act in {
        "run_folder": on("../tldr_mini-*", remove),
        "run_folder_renamed": on("../tldr_mini-*", rename),
    }.items():
        yield Entry(
            f"during.{name}",
            f"{part}: run folder removed or renamed",
            "hf",
            act,
            Outcome(codes(_1="out/"), same=False),
            at=Moment("wait", (2, 3, 4)),
        )
    for name in ("metrics.jsonl", "completions.jsonl"):
        for kind, damage in {"remove": remove, "truncate": truncate, "folder": folder_instead}.items():
            yield Entry(
                f"during.{kind}.{name}",
                f"{part}: {ROWS} removed, cut or replaced by a folder",
                "hf",
                on(name, damage),
                Outcome(codes(0, _1=name), reported=name),
                at=Moment("wait", (3, 4)),
                repair=without_folder(name),
            )
    for kind, pattern, damage in (
        ("log", "train.log", remove),
        ("environment", "environment.json", remove),
        ("config", "config.yaml", remove),
        ("config_garbage", "config.yaml", garbage),
        ("generator_log", "generator.log", remove),
        ("lock", ".lock*", remove),
        ("checkpoint", "checkpoint/", remove),
        ("checkpoint_file", "checkpoint/optimizer.pt", truncate),
    ):
        yield Entry(
            f"during.{kind}",
            f"{part}: log, config, lock or checkpoint removed or damaged",
            "lag",
            on(pattern, damage),
            Outcome(codes(0)),
            at=Moment("wait", (3, 4)),
        )
    yield Entry(
        "during.tmpdir",
        f"{part}: files in TMPDIR removed",
        "lag",
        clear_tmpdir,
        Outcome(codes(0, _1="error:")),
        at=ANY,
    )
    yield Entry(
        "during.run_folder_then_again",
        f"{part}: run folder removed or renamed",
        "lag",
        on("../tldr_mini-*", remove),
        gone,
        at=Moment("wait", (2, 3)),
    )


def without_folder(name: str) -> Act:
    """Return a repair that removes the folder in place of a file."""

    def repair(trial: Trial) -> None:
        for path in trial.out.glob(f"*/{name}"):
            if path.is_dir():
                path.rmdir()

    return repair


def clear_tmpdir(trial: Trial) -> None:
    """Remove all files in TMPDIR, as a cleaning job of the system does."""
    for path in trial.temporary.iterdir():
        discard(path)


# -- finished runs ---------------------------------------------------------------------------------


def finished() -> Iterator[Entry]:
    """Yield the entries of damages in the folder of a finished run, whose command is started again."""
    part = "Finished run"
    for kind, text in {"null": "null", "finished": '{"finished": true}', "list": "[]", "cut": "{"}.items():
        for run in ("hf", "extend", "evaluate"):
            yield Entry(
                f"finished.state_{kind}.{run}",
                f"{part}: `trainer_state.json` with other content",
                run,
                state_with(text),
                names("trainer_state.json"),
                begin="finished" if run == "hf" else "new",
            )
    for kind, pattern, damage in (
        ("model", "model", remove),
        ("weights", "model/model.safetensors", truncate),
        ("weights_removed", "model/model.safetensors", remove),
        ("metrics", "metrics.jsonl", remove),
        ("metrics_line", "metrics.jsonl", cut_line),
    ):
        for run in ("hf", "evaluate", "extend"):
            yield Entry(
                f"finished.{kind}.{run}",
                f"{part}: model or metrics removed or damaged",
                run,
                on(pattern, damage),
                Outcome(codes(0, _1="error:", _2="error:"), same=False),
                begin="finished" if run == "hf" else "new",
            )
    for kind, stray in STRAYS.items():
        yield Entry(
            f"finished.stray.{kind}",
            f"{part}: unrelated files, folders and links",
            "evaluate",
            stray,
            RESUMES if kind != "tmp_folder" else Outcome(codes(0), same=False),
        )


# -- cache_dir -------------------------------------------------------------------------------------


def cached() -> Iterator[Entry]:
    """Yield the entries of damages in `cache_dir`."""
    part = "Cache folder"
    for kind, pattern, same in (
        ("sft_removed", "cache/sft-*", True),
        ("reward_removed", "cache/reward-*", True),
        ("pairs_removed", "cache/pairs-*", False),  # pairs are made only for a missing reward model
        ("sft_model_removed", "cache/sft-*/model", False),
        ("reward_model_removed", "cache/reward-*/model", False),
        ("all_removed", "cache", True),
    ):
        yield Entry(
            f"cache.{kind}",
            f"{part}: models and pairs removed before the run",
            "hf",
            on(pattern, remove, top="trial"),
            Outcome(codes(0, _2="cache/"), same=same),
        )
    for kind, pattern, damage in (
        ("weights_cut", "cache/*/model/model.safetensors", truncate),
        ("weights_zeroed", "cache/*/model/model.safetensors", zero),
        ("weights_flipped", "cache/*/model/model.safetensors", flip),
        ("tokenizer", "cache/*/model/tokenizer*.json", truncate),
        ("config", "cache/*/model/config.json", garbage),
        ("state", "cache/*/trainer_state.json", empty),
    ):
        yield Entry(
            f"cache.{kind}",
            f"{part}: files of models cut, zeroed or altered before the run",
            "hf",
            on(pattern, damage, top="trial"),
            Outcome(codes(0, _1="cache/|NaN|nan|finite", _2="cache/"), same=False),
        )
    yield Entry(
        "cache.removed_during",
        f"{part}: removed during the run",
        "lag",
        on("cache", remove, top="trial"),
        Outcome(codes(0, _1="cache", _2="cache"), gone="cache"),
        at=Moment(LOAD, spread_s=1.0),
    )
    yield Entry(
        "cache.removed_during_stages",
        f"{part}: removed during the run",
        "stages",
        on("cache", remove, top="trial"),
        Outcome(codes(0, _1="cache", _2="cache")),
        at=Moment(LOAD, spread_s=3.0),
    )


ENTRIES = (*between(), *during(), *finished(), *cached())
