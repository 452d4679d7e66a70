"""`python -m svdq.cli`: the same as `svdq`, run by the chosen interpreter."""

import sys

# `python -m` puts the current folder first, so a redis.py in it would shadow the package.
if not sys.flags.safe_path:
    del sys.path[0]

from svdq.cli.main import main

main()
