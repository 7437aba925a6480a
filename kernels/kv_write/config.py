"""Sizes of the Mosaic kernel of `kv_write`."""

# Not measured on a GPU yet; as in `block_copy`.
STAGES = 4
STAGE_BYTES = 16 * 1024
PROGRAMS_PER_CORE = 2

MAX_GROUP = 8
"""Maximum tokens of a group; the kernel has separate copy instructions for each."""
