"""Turn any module into a sequence of layers; this needs torch and nothing else.

tracer.py         record the operations of a model's forward, with model_call.py, recording.py, kept_state.py,
                  traced_tensor.py and traced_shape.py
traces.py         record under several circumstances, to find what the operations depend on
batch.py          find which numbers among them depend on the number of examples
operations.py     the recorded operations in order, what is alive between them, and where to cut
segments.py       make a layer of the operations between two cuts; with inputs.py
errors.py         why a model cannot be recorded, and where in its code
traced_layers.py  all of it: a model as a sequence of layers
"""
