"""Fully sharded data parallelism over plain arrays.

The engine that shards parameters, gradients and optimizer state over the ranks of a communicator will live
here. It will see `pynccl` through its public face alone. This version holds only the name.
"""
