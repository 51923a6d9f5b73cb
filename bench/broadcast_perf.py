"""nccl-tests' broadcast_perf: every rank gets the root's data.

python -m bench.broadcast_perf -b 8 -e 64M -f 2 -g 2    # options: -h
"""

import sys

from bench.runner import main

if __name__ == "__main__":
    sys.exit(main("broadcast_perf"))
