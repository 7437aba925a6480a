"""Array code of the KV cache: paged attention, KV writes and block copies.

All functions are pure and can be jitted; those that return a pool update it in place when the pool
is donated. A pool is one layer's K or V, `[num_blocks + 1, kv_heads, block_size, head_dim]`; its
block 0 is a padding sink, whose contents are undefined. There is one folder per operation.
"""

from .argument_checks import KernelArgumentError
from .attention_backend import AttentionBackend, attention_backend
from .backends import compiler_options
from .block_copy import copy_blocks, gather_blocks, scatter_blocks
from .kv_write import kv_write
from .latent_attention import latent_decode, latent_extend
from .merge_states import merge_attention_states
from .paged_decode import paged_decode
from .paged_extend import paged_extend
from .value_checks import checked

__all__ = [
    "AttentionBackend",
    "KernelArgumentError",
    "attention_backend",
    "checked",
    "compiler_options",
    "copy_blocks",
    "gather_blocks",
    "kv_write",
    "latent_decode",
    "latent_extend",
    "merge_attention_states",
    "paged_decode",
    "paged_extend",
    "scatter_blocks",
]
