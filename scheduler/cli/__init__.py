"""The `radixkv` command line: one module per command, options in `options`, entry in `main`.

`main` imports the module of a command only when it runs, so that `radixkv --help` is immediate.
"""
