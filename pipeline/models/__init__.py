"""The model that the pipeline runs: the interface, and SVD, preview and simulated behind it."""
