"""RQ jobs in Redis: taken, held, ended, due. All contact with RQ's internals."""
