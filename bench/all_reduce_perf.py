"""nccl-tests' all_reduce_perf: every rank gets the reduction of all.

python -m bench.all_reduce_perf -b 8 -e 64M -f 2 -g 2    # options: -h
"""

import sys

from bench.runner import main

if __name__ == "__main__":
    sys.exit(main("all_reduce_perf"))
