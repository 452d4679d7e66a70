"""RQ's jobs and their life in Redis: taken, held, ended, due. All contact with RQ's internals."""
