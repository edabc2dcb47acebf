"""The figure of groups.jsonl: slots, ages, lengths, in the report of small run folders."""

import json
from random import Random

from rlhf.report.__main__ import main
from rlhf.report.figures import Response, asynchrony, in_slots
from tests.report.test_report import read, write_run


def write_groups(folder, fates=("trained",), updates=4):
    """Write groups.jsonl of two groups of two samples per update; the second one takes a fate in turn."""
    rows = []
    for update in range(1, updates + 1):
        for place, fate in enumerate(("trained", fates[update % len(fates)])):
            at = {"taken": update * 10.0, "loaded": update * 10.0 + 8} if fate in ("trained", "cut") else {}
            starts, ends = [update * 10 - 10.0] * 2, [update * 10 - 1.0, update * 10.0]
            rows.append({"update": update, "group": 2 * update + place, "version": max(0, update - 2), **at})
            rows[-1] |= {"fate": fate, "starts": starts, "ends": ends, "lengths": [1, 2], "row": 0}
    (folder / "groups.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_responses_never_overlap_in_a_slot_and_use_only_as_many_slots_as_needed():
    for seed in range(20):
        draw = Random(seed)
        starts = [draw.randint(0, 60) for _ in range(80)]
        responses = [Response(start, start + draw.randint(1, 9), False, False) for start in starts]
        needed = max(sum(each.start <= at < each.end for each in responses) for at in range(70))
        for count in (0, needed, needed + 3):
            slots = in_slots(responses, count)
            assert len(slots) == max(count, needed)
            assert sorted(each for slot in slots for each in slot) == sorted(responses)
            for slot in slots:
                assert all(one.end <= other.start for one, other in zip(slot, slot[1:], strict=False))


def test_runs_with_groups_have_timelines_ages_and_curves_over_virtual_time(tmp_path, capsys):
    virtual = {"rollouts/time_s": 1.0, "schedule.update": "in_flight"}
    for name, fates in {"pace": ("trained",), "rest": ("dropped", "cut", "replaced")}.items():
        folder = write_run(tmp_path / "runs" / name, training=virtual, **{"schedule.stale": name})
        write_groups(folder, fates)
    write_run(tmp_path / "runs" / "wall")
    damaged = write_run(tmp_path / "runs" / "damaged", training=virtual, **{"optim.lr": 2})
    (damaged / "groups.jsonl").write_text("{}\n")
    main([str(tmp_path / "runs"), "--out", str(tmp_path / "report")])
    html = (tmp_path / "report" / "index.html").read_text()
    assert (tmp_path / "report" / "asynchrony.png").exists() and '<section id="asynchrony">' in html
    assert html.count("% of this time") == 2 and html.count("ages of trained groups") == 1
    over_time = html.partition('id="win_rate_against_time"')[2].partition("</section>")[0]
    assert "virtual time (seconds)" in over_time and "With a single seed" in over_time
    assert "groups of damaged (groups.jsonl, line 1: not a row with update, version" in html


def test_deciles_are_drawn_only_if_a_group_was_cut_or_dropped(tmp_path):
    folder = write_run(tmp_path / "a", training={"rollouts/time_s": 1.0})
    for fates, panels in {("trained", "replaced"): 2, ("trained", "cut"): 3, ("dropped",): 3}.items():
        write_groups(folder, fates)
        chart = asynchrony(read(folder)[0], [])
        assert chart is not None and len(chart.panels) == panels == 2 + ("decile" in chart.caption)


def test_runs_without_groups_have_no_figure_of_asynchrony(tmp_path):
    (section,) = read(write_run(tmp_path / "wall"))
    assert asynchrony(section, remarks := []) is None and not remarks
