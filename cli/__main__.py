"""`python -m svdq.cli`: the same as `svdq`, with the interpreter that is wanted."""

import sys

# `python -m` puts the current folder first: a redis.py in it would be imported.
if not sys.flags.safe_path:
    del sys.path[0]

from svdq.cli.main import main

main()
