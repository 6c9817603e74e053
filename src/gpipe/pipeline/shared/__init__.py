"""One parameter in several places: tied parameters and replicas."""
