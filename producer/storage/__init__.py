"""Storage of photos, videos and checkpoints: a local folder or an object store."""
