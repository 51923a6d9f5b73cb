"""nccl-tests' all_gather_perf: every rank gets the blocks of all.

python -m bench.all_gather_perf -b 8 -e 64M -f 2 -g 2    # options: -h
"""

import sys

from bench.runner import main

if __name__ == "__main__":
    sys.exit(main("all_gather_perf"))
