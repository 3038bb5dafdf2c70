"""The exact kernels: a small C library in which every sum has one order, whatever the batch, the tiles, the threads or the cache.

``bindings.Net`` wraps it; ``build`` compiles it for this processor on first use. Importing this package compiles nothing.
"""
