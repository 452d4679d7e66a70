"""RQ jobs in Redis: take, renew, end, schedule, recover. All contact with RQ's internals."""
