"""The timestep pipeline: samples, partition, stages, transport, models, media, bench.

Importing this package does not import torch. The producer side uses only the modules that do not import torch either,
such as `errors` and `parameters`.
"""
