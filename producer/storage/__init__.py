"""Storage of photos, videos and checkpoints: a local folder, an object store or a file server."""
