"""nccl-tests' hypercube_perf: an all-gather by exchanges in log2(n) dimensions, on 2, 4, 8, .. ranks.

python -m bench.hypercube_perf -b 8 -e 64M -f 2 -g 4    # options: -h
"""

import sys

from bench.runner import main

if __name__ == "__main__":
    sys.exit(main("hypercube_perf"))
