"""Boundary tensors between processes.

transfer.py          the boundary between two stages in two processes
streams.py           one direction of it, with a thread at each end; local.py, within one host
format.py            a payload laid out in a message
"""
