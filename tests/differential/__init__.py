"""Random configurations, each trained in several ways that must give the same bits.

    python -m tests.differential --configurations 2000 --seed 1 --results build/differential.jsonl

A configuration is a model (odd shapes, tensors of one element and larger than a bucket; tied, frozen and unused
parameters; float32, bfloat16 or float16), an optimizer of thinwire, a compressor of `thinwire.compress` or local steps,
each with random options, a grid of ranks (1 to 4, or two nodes of two), bucket sizes, gradient accumulation, and now
and then a gradient that is not finite. It is made from the seed and its number, so that it can be made again.

The ways: *attached*, in DDP with `thinwire.attach` or `thinwire.compress`, where the exchange overlaps with backward;
*alone*, without DDP; *reference*, the same with the reference kernels; *virtual*, with virtual workers. After every
step the parameters, and in the end what the optimizer keeps, must be equal to the bit, rank by rank.

Processes are made once and run one configuration after another. If one fails, the others of its grid are replaced.
"""
