"""What strangers may send: bytes that nobody has made on purpose, or somebody on purpose to do harm.

    python -m tests.fuzz --inputs 1000000 --seed 1

Four targets. `packets`: packets that were altered on the way must be refused, whatever was altered. `payloads`: packets
with a right checksum and any contents go through every scheme and its kernels, which must stay within their memory.
`steps`: the same through whole optimizers. `checkpoints`: altered files must be refused, or loaded as data.

An input is made from the seed, the target's name and its number, so that any of them can be made again. Inputs run in a
process of their own: one that ends it, or keeps it busy for too long, is found by its number and written to a file, as
is one that raises what it should not. `python -m tests.fuzz --replay FILE` runs it again.
"""
