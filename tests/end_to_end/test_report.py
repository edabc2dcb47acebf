"""Tests of the report on the runs of docs/runs.md: two algorithms, two seeds, one asynchronous run."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from rlhf.report.runs import find_runs
from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from tests import needs
from tests.end_to_end import browser
from tests.end_to_end.conftest import TINY, interrupted

DOCS = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
LONGER = ["schedule.total_episodes=64", "schedule.eval_every=1"]
LABELS = {"algo=dpo max_lag=0": 2, "algo=dpo max_lag=1": 1, "algo=rloo max_lag=0": 2}  # label -> seeds
FIGURES = [
    *("win_rate_against_kl", "learning_curves", "optimization", "win_rate_against_time"),
    *("lag_and_mismatch", "time_per_phase"),
]


@pytest.fixture(scope="module")
def made(cache_dir, tmp_path_factory):
    """Run the commands of docs/runs.md with tiny runs; return the folder and the last command's output."""
    folder = tmp_path_factory.mktemp("reports")
    found = re.search(r"executed by .*?```text\n(.*?)```", DOCS, re.S)
    assert found is not None
    printed = ""
    for line in found[1].splitlines():
        _, *words = shlex.split(line)
        extra = [*TINY, f"cache_dir={cache_dir}", *LONGER] if "rlhf.train" in words else []
        done = subprocess.run(
            [sys.executable, *words, *extra],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    return folder, printed


def test_documented_commands_print_a_table_and_write_a_page_and_figures(made):
    folder, printed = made
    assert re.match(r"RL on tldr_mini\n(Best of 3 settings: |\d of 3 settings tie: )", printed)
    for label, seeds in LABELS.items():
        assert re.search(rf"^ *{re.escape(label)} +{seeds} ", printed, re.M), printed
    out = folder / "outputs" / "report"
    assert {path.name for path in out.iterdir()} == {"index.html", *(f"{name}.png" for name in FIGURES)}
    for name in FIGURES:
        with Image.open(out / f"{name}.png") as picture:
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 20, name


def test_report_table_has_the_mean_gold_score_of_the_runs(made):
    folder, _ = made
    html = (folder / "outputs" / "report" / "index.html").read_text()
    states = [
        json.loads(path.read_text())["result"]["eval/gold_score"]
        for path in (folder / "outputs").glob("*-rloo-*/trainer_state.json")
    ]
    assert len(states) == 2
    rows = html.partition("<tbody>")[2].partition("</tbody>")[0].split("<tr")
    (row,) = (row for row in rows if "algo=rloo max_lag=0" in row)
    assert f'data-value="{sum(states) / 2!r}"' in row


def test_the_page_lists_commands_and_commit_and_puts_answers_side_by_side(made):
    folder, _ = made
    html = (folder / "outputs" / "report" / "index.html").read_text()
    commands = re.findall(r'<div class="command"><code>python -m rlhf.train (.*?)</code>', html)
    assert any({"-m", "algo=dpo,rloo", "seed=1,2"} <= set(command.split()) for command in commands)
    for run_folder in find_runs([str(folder / "outputs")]).runs:
        assert run_folder.commit in html and run_folder.folder.name in html
    sample = html.partition('<section id="completions">')[2].partition("</details>")[0]
    titles = re.findall(r"<h4>(.*?)</h4>", sample)
    answers = {f"{label} · seed 1 · update {last}" for label, last in zip(LABELS, (4, 4, 2), strict=True)}
    assert titles[:2] == ["reference response", "before training"] and set(titles[2:]) == answers


def test_interrupted_run_is_reported_up_to_its_last_update(tiny, tmp_path):
    folder = RunFolder(tmp_path / "run")
    with interrupted(update=3):
        run(tiny("schedule.total_episodes=64", "schedule.eval_every=2"), folder)
    (found,) = find_runs([str(folder.path)]).runs
    assert found.progress == "unfinished, update 3 of 4"
    assert found.last("eval/gold_score") is not None and found.seconds() > 0


# Returns how far the results are wider than their place, the sizes of the panels, the numbers of panels
# by figure, pairs of overlapping texts of a panel,
# texts outside of their panel, elements wider than the page (tables scroll), whether hovering over the first
# group dims the other groups, and the column values after a click on the column's heading.
EXPRESSION = """(() => {
  const boxes = [...document.querySelectorAll("figure svg")].map((svg) => svg.getBoundingClientRect());
  const figures = [...document.querySelectorAll("figure")].map((one) => one.querySelectorAll("svg").length);
  const outside = [...document.querySelectorAll("figure svg")].flatMap((svg) => {
    const box = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].filter((text) => {
      const own = text.getBoundingClientRect();
      return own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1
        || own.bottom > box.bottom + 1;
    }).map((text) => text.textContent);
  });
  const wide = [...document.querySelectorAll("main *")].filter((one) => !one.closest(".wide")
    && one.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map((one) => one.tagName);
  const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4;
  const overlaps = [...document.querySelectorAll("figure svg")].flatMap((svg) => {
    const texts = [...svg.querySelectorAll("text")]
      .map((text) => [text.textContent, text.getBoundingClientRect()]);
    return texts.flatMap(([one, box], i) => texts.slice(i + 1)
      .filter(([, other]) => over(box, other)).map(([other]) => one + " | " + other));
  });
  const line = document.querySelector("#learning_curves .series-0");
  line.dispatchEvent(new PointerEvent("pointerenter"));
  const faint = [...document.querySelectorAll("#learning_curves .series:not(.focus)")];
  const alone = document.querySelectorAll(".series-0.focus").length;
  const dims = document.body.classList.contains("focused") && faint.every((e) => !e.matches(".series-0"));
  line.dispatchEvent(new PointerEvent("pointerleave"));
  const after = document.querySelectorAll(".focused, .focus").length;
  const heading = [...document.querySelectorAll("#results th")].find((th) => th.innerText === "judge score");
  heading.querySelector("button").click();
  const sorted = [...document.querySelectorAll("#results tbody tr")]
    .map((row) => parseFloat(row.cells[heading.cellIndex].dataset.value));
  const sizes = boxes.map((box) => [box.width, box.height]);
  const table = document.querySelector("#results .wide");
  const cut = table.scrollWidth - table.clientWidth;
  return {cut, sizes, figures, overlaps, outside, wide, alone, dims, faint: faint.length, after, sorted};
})()"""

SERIES = {"light": (0x00, 0x72, 0xB2), "dark": (0x4A, 0xA8, 0xE0)}  # --series-0 of rlhf/report/page.css
PAPER = {"light": (0xFF, 0xFF, 0xFF), "dark": (0x14, 0x17, 0x1B)}


@pytest.mark.system
@pytest.mark.skipif(browser.find() is None, reason=needs.BROWSER)
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 420)])
def test_page_renders_in_light_and_dark_wide_and_narrow(made, tmp_path, scheme, width):
    page = made[0] / "outputs" / "report" / "index.html"
    seen = browser.look(str(browser.find()), page, tmp_path, scheme, width, EXPRESSION)
    assert seen.console == []
    assert seen.asked == [page.as_uri()]
    value = seen.value
    assert len(value["figures"]) == len(FIGURES) and all(value["figures"])
    assert all(350 < across < 550 and high > 100 for across, high in value["sizes"])
    assert value["overlaps"] == value["outside"] == value["wide"] == []
    assert value["cut"] <= 0 or width < 1280, "the last column of the results is visible"
    assert value["alone"] > 3 and value["dims"] and value["faint"] > 3 and value["after"] == 0
    assert value["sorted"] == sorted(value["sorted"], reverse=True) and len(value["sorted"]) == len(LABELS)
    for name in ("top", "win_rate_against_kl", "learning_curves"):
        with Image.open(tmp_path / f"{name}.png") as picture:
            pixels = picture.convert("RGB")
        assert pixels.getpixel((5, 5)) == PAPER[scheme]
        blue = sum(count for count, colour in pixels.getcolors(1 << 24) if colour == SERIES[scheme])
        assert blue > 100, f"{name}: the first series is not visible"
