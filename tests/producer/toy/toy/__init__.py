"""A whole family of models in one folder: the measure of what a family must state, and that nothing else names one."""
