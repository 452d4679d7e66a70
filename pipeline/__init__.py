"""The timestep pipeline: samples, partition, stages, transport, models, video files, bench.

Knows torch and diffusers; knows nothing of Redis, RQ, queues or terminals. Importing this package, or
`errors` and `parameters` in it, imports no torch: the producer side uses those two.
"""
