"""click commands of `svdq`. One module for each group of commands."""
