"""Program of one rank in test_ranks.py and test_backends.py: executes training runs one after the other.

torchrun --nproc-per-node 2 -m tests.end_to_end.rank_runs <JSON file with a list of [arguments, folder]>
"""

import json
import sys
from pathlib import Path

import psutil

from rlhf.runs.folder import RunFolder
from rlhf.stages.run import run
from rlhf.words.compose import compose


def listening() -> list[str]:
    """Return the addresses on which this process listens for connections."""
    connections = psutil.Process().net_connections("inet")
    return sorted({each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN})


if __name__ == "__main__":
    for words, folder in json.loads(Path(sys.argv[1]).read_text()):
        run(compose(words), RunFolder(Path(folder)))
    print("listens on", *listening())
