"""The timestep pipeline: samples, partition, stages, transport, models, video files, bench.

Knows torch and diffusers; knows nothing of Redis, RQ, queues or terminals. Importing this package imports no torch, and
the producer side uses only those of its modules that import none either, such as `errors` and `parameters`.
"""
