"""Where photos, videos and checkpoints lie: a local folder, an object store or a file server."""
