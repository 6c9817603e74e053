"""Guards around the imports of other packages, each with the package's version and the reason."""
