"""nccl-tests' scatter_perf: every rank gets a block of the root's data.

python -m bench.scatter_perf -b 8 -e 64M -f 2 -g 2    # options: -h
"""

import sys

from bench.runner import main

if __name__ == "__main__":
    sys.exit(main("scatter_perf"))
