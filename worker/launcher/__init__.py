"""Groups of ranks as processes: their start, their end, metrics and notifications. Does not import torch."""
