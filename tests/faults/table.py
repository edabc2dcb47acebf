"""The table of the catalogue in results.md of this folder.

python -m tests.faults.table            write the table
python -m tests.faults.table --check    write nothing; exit with 1 if the table is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.faults.catalogue import ENTRIES
from tests.faults.entry import Entry, Outcome
from tests.faults.trial import ROOT

PAGE = Path(__file__).with_name("results.md")
BEGIN = "<!-- begin of the table of tests/faults, written by `python -m tests.faults.table` -->\n"
END = "<!-- end of the table of tests/faults -->\n"


def table() -> str:
    """Return the table: a row for each group of entries."""
    groups: dict[str, list[Entry]] = {}
    for entry in ENTRIES:
        groups.setdefault(entry.group, []).append(entry)
    return "\n".join(["", *lines(groups), "", ""])


def lines(groups: dict[str, list[Entry]]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"The catalogue has {len(ENTRIES)} entries."
    yield ""
    yield "| part | injected fault | entries | exit code | afterwards |"
    yield "|---|---|--:|---|---|"
    for group, entries in groups.items():
        part, _, fault = group.partition(": ")
        yield f"| {part} | {fault} | {len(entries)} | {exit_codes(entries)} | {afterwards(entries)} |"


def exit_codes(entries: Iterable[Entry]) -> str:
    """Return the exit codes that the entries allow, as a shell reports them."""
    allowed = {code for entry in entries for code in entry.outcome.codes}
    allowed |= {code for entry in entries for code in entry.outcome.second}
    shown = sorted({128 - code if code < 0 else code for code in allowed})
    return " or ".join([", ".join(map(str, shown[:-1])), str(shown[-1])] if shown[1:] else map(str, shown))


def afterwards(entries: Iterable[Entry]) -> str:
    """Return what holds after the fault, in one phrase."""
    phrases = dict.fromkeys(phrase(entry.outcome) for entry in entries)
    implied = [one for one in phrases if any(other.startswith(f"{one}, or") for other in phrases)]
    return ", or ".join(one for one in phrases if one not in implied)


def phrase(outcome: Outcome) -> str:
    """Return what an outcome requires after the fault."""
    if not outcome.same:
        return "a message without traceback"
    return "equal results, or the loss is reported" if outcome.reported else "equal results"


def page_with_table(page: str) -> str:
    """Return the page with the current table between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert rest and after is not None, f"no markers in {PAGE.name}"
    return f"{before}{BEGIN}{table()}{END}{after}"


def main() -> None:
    """Write the table, or compare it with the page."""
    page = PAGE.read_text(encoding="utf-8")
    new = page_with_table(page)
    if "--check" in sys.argv[1:]:
        if new != page:
            sys.exit(f"{PAGE.relative_to(ROOT)} is out of date; run: python -m tests.faults.table")
    elif new != page:
        PAGE.write_text(new, encoding="utf-8")
        print(f"written: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
