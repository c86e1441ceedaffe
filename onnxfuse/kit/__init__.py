"""Kits: all that a machine with the right GPU needs to build, check and time a model's engines, made where there is no GPU."""
