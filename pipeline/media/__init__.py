"""Photos in, video files out."""
