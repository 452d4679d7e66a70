"""The timestep pipeline: planning, stage loop, transport, models and media. Importing it does not import torch."""
