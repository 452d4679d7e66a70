"""RQ's jobs and their life in Redis: taken, held, ended, due, called back. All contact with RQ's internals."""
