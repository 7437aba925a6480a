"""The file backend: a directory with one file per block."""
