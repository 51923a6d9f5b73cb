"""nccl-tests' alltoallv_perf: blocks of different sizes between all ranks (NCCL_TESTS_ALLTOALLV_*).

python -m bench.alltoallv_perf -b 8 -e 64M -f 2 -g 2    # options: -h
"""

import sys

from bench.runner import main

if __name__ == "__main__":
    sys.exit(main("alltoallv_perf"))
