"""Options of each command, one module per command.

`radixkv --help` loads this folder, so it imports neither NumPy, JAX nor Rich.
"""
