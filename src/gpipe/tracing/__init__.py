"""Turn any module into a sequence of layers; this needs torch and nothing else.

tracer.py      record the operations of a model's forward, with recording.py, traced_tensor.py and traced_shape.py
batch.py       find which numbers among them depend on the number of examples
segments.py    cut where few tensors are alive, and make a layer of each piece; with inputs.py
errors.py      why a model cannot be recorded, and where in its code
"""
