"""Two runs of the same small model with the same budget: the work of `thinwire demo`."""
