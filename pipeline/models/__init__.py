"""The models of the pipeline: a common interface, implemented by SVD, preview and simulated."""
