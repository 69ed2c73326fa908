"""What strangers may send: bytes that nobody has made on purpose, or somebody on purpose to do harm.

    python -m tests.fuzz --inputs 1000000 --seed 1

Three targets. `packets`: packets that were altered on the way must be refused, whatever was altered. `steps`: packets
with a right checksum and any contents go through whole optimizers, whose kernels must stay within their memory.
`checkpoints`: altered files must be refused; those whose digests match too, or be loaded as data.

An input is made from the seed, the target's name and its number, so that any of them can be made again. Inputs run in a
process of their own: one that ends it, or keeps it busy for too long, is found by its number and written to a file, as
is one that raises what it should not. `python -m tests.fuzz --replay FILE` runs it again. With `--results FILE` the
counts are written as they come, and a second call continues where the first was interrupted.
"""
