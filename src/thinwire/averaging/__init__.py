"""Compressed averaging of gradients, for any optimizer: what `thinwire.compress` is made of."""
