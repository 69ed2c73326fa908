"""How workers fill packets, how owners merge them, and the state that both keep: one module per compressor.

`thinwire.transport.compressor` has the interface. A *codec* (`thinwire.compressors.codecs`) turns one vector into bytes
and back. It does not depend on workers or packets and can be used on its own.
"""
