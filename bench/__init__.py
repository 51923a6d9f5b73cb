"""nccl-tests for Python: the same sweeps, options, text and checks, over any library that pynccl can load.

`python -m bench` lists what can be run. `python -m bench.all_reduce_perf -b 8 -e 64M -f 2 -g 2` starts two
ranks on this machine. A program is one row of `collectives.py`; docs/architecture.md has the map of the rest.
"""
