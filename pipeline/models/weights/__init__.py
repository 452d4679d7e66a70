"""From the files of a model to layers."""
