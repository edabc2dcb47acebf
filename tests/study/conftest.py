"""A study of two methods at three lags, which tests plan, extend and give to workers."""

import pytest

from rlhf.study.file import read_spec

STUDY = """\
study: short
set: [task=arithmetic, model=pythia, debug=tiny]
seeds: 2
repeat: [seed, stages.seed]
methods: {dpo: [algo=dpo], rloo: [algo=rloo]}
axes: {lag: {key: schedule.max_lag, values: [0, 1, 4], base: 0}}
grids: [{lag: all}]
"""


@pytest.fixture
def study(tmp_path):
    def write(text=STUDY, name="short"):
        (tmp_path / f"{name}.yaml").write_text(text)
        return read_spec(tmp_path / f"{name}.yaml")

    return write
