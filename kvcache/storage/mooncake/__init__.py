"""The Mooncake backend: blocks in the pooled memory of several machines."""
