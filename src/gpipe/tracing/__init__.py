"""Any module as a sequence of layers; needs torch and nothing else.

tracer.py      which operations a model's forward runs, and on what. Its parts: recording.py, traced_tensor.py,
               traced_shape.py
batch.py       which numbers among them follow the number of examples
segments.py    where few tensors are alive, and a layer for each piece between. Its part: inputs.py
errors.py      why a model cannot be recorded, and where in its code that is
"""
