"""nccl-tests' sendrecv_perf: every rank sends to the next and receives from the previous one.

python -m bench.sendrecv_perf -b 8 -e 64M -f 2 -g 2    # options: -h
"""

import sys

from bench.runner import main

if __name__ == "__main__":
    sys.exit(main("sendrecv_perf"))
