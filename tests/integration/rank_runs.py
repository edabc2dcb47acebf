"""What a rank does in test_ranks.py: carries out runs one after the other, with the ranks beside it.

torchrun --nproc-per-node 2 -m tests.integration.rank_runs <file with a list of [words, folder]>
"""

import json
import sys
from pathlib import Path

from rlhf.compose import compose
from rlhf.folder import RunFolder
from rlhf.run import run

if __name__ == "__main__":
    for words, folder in json.loads(Path(sys.argv[1]).read_text()):
        run(compose(words), RunFolder(Path(folder)))
