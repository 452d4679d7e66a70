"""RQ jobs in Redis: take, renew, end, schedule, recover, set aside. All contact with RQ's internals."""
