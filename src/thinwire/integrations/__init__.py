"""thinwire in the words of training frameworks: one module each, which alone imports its framework.

`thinwire.attach` and `thinwire.compress` work without these modules wherever a framework hands out its model. The
modules add what frameworks do around the training loop: checkpoints with the states of all ranks, clipping, loss
scales, evaluation and logs.
"""
