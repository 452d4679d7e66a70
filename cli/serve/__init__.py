"""`svdq serve`: a web page and the `/v1/videos` API on the queue. Imports neither the worker nor torch."""
