"""Methods beside committed rows: the study file that `rlhf study add` writes, and its anchors."""

from dataclasses import replace

import pytest

from rlhf.core.errors import UserError
from rlhf.study import study as adding
from rlhf.study.file import read_spec
from rlhf.study.plan import Plan
from rlhf.study.rows import Results, write_rows
from rlhf.study.study import Study
from tests.study.conftest import STUDY
from tests.study.test_planning import row

MINE = "methods: {mine: [algo=bok]}\nclaims: {mine is better: value(mine) > value(dpo)}\n"


@pytest.fixture
def files(study, tmp_path):
    spec = study(STUDY.replace("all}]", "all}, {method: dpo, lag: 4}]"))
    write_rows(spec.rows, [replace(row(each), cpu_s=4.0) for each in Plan(spec, []).runs])
    (tmp_path / "mine.yaml").write_text(f"study: beside\n{MINE}")
    return spec, tmp_path / "mine.yaml"


def test_the_new_study_runs_its_methods_in_the_cells_of_the_other_and_shows_its_rows(files):
    spec, mine = files
    added = read_spec(adding.write_study(spec, mine))
    first = [str(each.run) for each in Plan(added, []).runs][:2]
    assert first == ["short mine lag=0 seed 1", "short mine lag=1 seed 1"]
    results = Results.read(added)
    assert results.missing == results.expected == 6 and len(results.rows) == 12
    added.file.unlink()
    mine.write_text(f"study: beside\n{MINE.replace('(dpo)', '(dpo) at lag=1')}grids: [{{lag: 1}}]\n")
    fewer = read_spec(adding.write_study(spec, mine))
    assert {str(each.run.cell) for each in Plan(fewer, []).runs} == {"short mine lag=1"}
    assert {str(each.run.cell) for each in adding.anchors(Study(spec), fewer)} == {"short dpo lag=1"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            f"study: beside\n{MINE}grids: [{{lag: 1}}]\n",
            ", line 3: claims.mine is better must be about cells",
        ),
        (
            "study: beside\nmethods: {mine: [algo=bok]}\nclaims: {no: value(nobody) > 0}\n",
            ".*claims.no .*nobody",
        ),
        (f"study: beside\n{MINE}grids: [lag]\n", ", line 4: grids.0 must be a mapping"),
        (
            "study: beside\nmethods:\n  mine: [algo=bok, algo.betta=1]\n",
            r", line 3: methods.mine \(short mine lag=0 and 2 more cells\): algo.betta must be",
        ),
        ("methods: {dpo: [algo=dpo]}", ", line 1: methods.dpo must not be a method of short"),
    ],
)
def test_a_mistake_has_its_line_in_the_file_of_the_methods_and_writes_no_study(files, text, found):
    spec, mine = files
    mine.write_text(text)
    with pytest.raises(UserError, match=f"{mine}{found}"):
        adding.write_study(spec, mine)
    assert not (spec.file.parent / "beside.yaml").exists()


def test_a_study_that_exists_is_not_replaced(files):
    spec, mine = files
    adding.write_study(spec, mine)
    mine.write_text(f"study: beside\n{MINE}grids: [{{lag: 1}}]\n")
    with pytest.raises(UserError, match="exists and differs"):
        adding.write_study(spec, mine)


def test_anchors_say_whether_old_and_new_rows_are_paired(files, monkeypatch):
    spec, mine = files
    added = read_spec(adding.write_study(spec, mine))
    monkeypatch.setattr(Study, "repeat", lambda self, where, folder: (old(self, where), old(self, where)))
    assert [*adding.compare(Study(spec), added)] == [
        "4 anchors: about 1 min of CPU time, and the stages before",
        *(f"anchor short dpo lag={lag} seed {seed}: equal bits" for seed in (1, 2) for lag in (0, 4)),
        "old and new rows are paired by seed",
    ]

    def other(self, where, folder):
        found = old(self, where)
        value = 0.3 + int(where["seed"]) / 1000
        return found, replace(found, machine="another", metrics={"eval/win_rate": value})

    monkeypatch.setattr(Study, "repeat", other)
    *_, average, chance = adding.compare(Study(spec), added)
    assert average == "old and new rows are not paired; the anchors differ by -0.199 on average"
    assert chance.startswith("more than chance: run the methods of short here, too")
    assert [event["equal"] for event in added.events("anchors")] == [True, False]


def old(study, where):
    (planned,) = study.plan({name: [value] for name, value in where.items()}).runs
    return planned.row
