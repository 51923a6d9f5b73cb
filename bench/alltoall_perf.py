"""nccl-tests' alltoall_perf: every rank gets a block of every rank.

python -m bench.alltoall_perf -b 8 -e 64M -f 2 -g 2    # options: -h
"""

import sys

from bench.runner import main

if __name__ == "__main__":
    sys.exit(main("alltoall_perf"))
