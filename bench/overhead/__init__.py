"""What `bench.call_overhead` stands on.

`null_library.c` is a library of NCCL's functions that do nothing, `null.py` builds it, `subjects.py` is the
process in which the calls are timed, `imports.py` times `import pynccl` in fresh processes.
"""
