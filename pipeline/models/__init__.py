"""The models of the pipeline: a common interface, implemented by each family, preview and simulated."""
