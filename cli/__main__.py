"""`python -m svdq.cli`: the same as `svdq`, with the interpreter that is wanted."""

from svdq.cli.main import main

main()
