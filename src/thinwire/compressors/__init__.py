"""How workers fill packets, how owners merge them, and what both remember: one module per compressor.

`thinwire.transport.compressor` has the interface. A *codec* (`thinwire.compressors.codecs`) turns one vector into bytes
and back; it knows nothing of workers and can be used by itself.
"""
