"""`python -m bench.all_reduce_perf -b 8 -e 64M -f 2 -g 2`: nccl-tests' all_reduce_perf. Options: -h."""

import sys

from bench.runner import main

if __name__ == "__main__":
    sys.exit(main("all_reduce_perf"))
