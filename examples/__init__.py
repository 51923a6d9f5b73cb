"""Programs to read and to run: `hello.py` first, then `train_bytes_lm.py`; `demo.py` shows everything."""
