"""`svdq bench` through loop and daemon."""
