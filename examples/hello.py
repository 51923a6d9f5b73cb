import numpy as np

import pynccl

with pynccl.init() as comm:
    x = np.full(4, comm.rank + 1.0)
    comm.all_reduce(x)
    print(f"rank {comm.rank} of {comm.size} has {x}\n", end="")
