"""Command `python -m rlhf.audit <file> [flags]`: recompute a dumped optimizer step of any framework.

Exit codes:
    0: no term is wrong.
    1: a term is wrong.
    2: the file or an argument is invalid.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

from rlhf.launch.command_line import with_flags
from rlhf.terminal.console import console, show

_MARKS = {"ok": "agrees", "wrong": "WRONG", "unchecked": "not checked"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with `arguments`, by default those of the command line."""
    with with_flags("audit", arguments) as options:
        from rlhf.referee.audit import audit, weights
        from rlhf.referee.file import read
        from rlhf.referee.recipe import own_rows

        own = own_rows(options.mistakes) if options.mistakes else {}
        file = read(options.file)
        if file.header.get("kind") == "bundle":
            from rlhf.referee.replay import batch_file, token_table

            if options.sample is not None:
                table = token_table(file, options.step, options.sample)
                show(table.to_string(line_width=console.width))
                if options.html:
                    options.html.write_text(f"<meta charset=utf-8>{table.to_html()}", encoding="utf-8")
                return
            file = batch_file(file, options.step)
        if options.ignore_claims:
            file = replace(file, header={**file.header, "claims": {}})
        findings = audit(file, own)
        if options.model:
            findings += weights(file, options.model)
        wrong = [each for each in findings if each.state == "wrong"]
        if options.json:
            print(json.dumps([asdict(each) for each in findings]))
        else:
            head = f"{file.header.get('framework', 'unknown')} {file.header.get('version', '')}".strip()
            size = f"{len(file.mask)} responses, {int(file.mask.sum())} tokens"
            said = "" if file.header.get("claims") else "; no settings in the file: the variant is identified"
            show(f"{file.path.name}: {head}, step {file.header.get('step', '?')}, {size}{said}")
            for each in findings:
                show(f"  {each.term:19}{_MARKS[each.state]:12}{each.text}")
            show(f"first wrong term: {wrong[0].term}: {wrong[0].text}" if wrong else "agrees")
        raise SystemExit(int(bool(wrong)))


if __name__ == "__main__":
    main()
