"""One parameter in several places: tied parameters, and replicas that copy or shard the weights.

tied_parameters.py   parameters that several layers share
replicas.py          the processes that hold the same stages
averaging.py         gradients, averaged over them
sharding.py          weights, sharded over them; sharded_optimizer.py, the optimiser's state alone
synchronized_norm.py batch norms with the statistics of all
connection.py        what stages exchange with the same stages of other replicas
peers.py             processes that exchange tensors during a step
"""
