"""Ours against other libraries' collectives in one run: the parts of `python -m bench.peers`.

`cases.py` says what is measured and what it must move, `worker.py` how a rank obeys and checks, `ours.py`,
`mpi.py` and `gloo.py` one library each, `roofline.c` the machine's own limit, `environment.py` where the
others live, `sides.py` how ranks are started and asked, `measure.py` the order of the rounds, `targets.py`
what ours has to reach, `rows.py` what is made of the times, `table.py` how it is printed.
"""
