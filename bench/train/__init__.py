"""One training step, ours against others': the contestants of `python -m bench.train_step`.

`problem.py` is what is trained (equal numbers in every library), `worker.py` how a rank obeys, `pool.py` how
ranks are started and asked, `ours.py`, `fsdp2.py` and `ddp.py` one contestant each (`torch_side.py`: what the
two torch ones share), `environment.py` where they run, `ideal.py` the roofline, `outcome.py` what is made of
the times.
"""
