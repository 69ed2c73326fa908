"""`thinwire chaos`: training on a testbed where everything fails, again and again, and no bit may differ in the end."""
