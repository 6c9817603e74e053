"""One parameter in several places: tied parameters, and replicas that copy or shard the weights."""
