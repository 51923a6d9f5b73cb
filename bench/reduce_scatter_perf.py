"""nccl-tests' reduce_scatter_perf: every rank gets a block of the reduction of all.

python -m bench.reduce_scatter_perf -b 8 -e 64M -f 2 -g 2    # options: -h
"""

import sys

from bench.runner import main

if __name__ == "__main__":
    sys.exit(main("reduce_scatter_perf"))
