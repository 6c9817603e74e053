"""Guards around other packages: what their imports need on today's machines, with the version and the reason."""
