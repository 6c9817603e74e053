"""One parameter in several places: tied parameters, and replicas that have all weights or share them out."""
