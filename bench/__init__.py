"""nccl-tests for Python: the same sweeps, options, text and checks, over any library that pynccl can load.

`python -m bench.all_reduce_perf -b 8 -e 64M -f 2 -g 2` starts two ranks on this machine. A program is one row
of `collectives.py`; `options.py` has the command line, `check.py` the exact inputs, `format.py` what is
printed and written, `devices.py` where buffers live, `runner.py` the order in which it all happens.
"""
