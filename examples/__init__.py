"""Programs to read and to run: `hello.py` first, then `numpy_gpt.py`; `demo.py` shows everything."""
