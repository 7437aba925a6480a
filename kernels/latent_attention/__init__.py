"""Paged attention over latents, as in multi-head latent attention (MLA) of DeepSeek-V2 and later.

Public: `latent_decode`, `latent_extend`. The modules are their two backends and what they need.
"""

from .api import latent_decode, latent_extend

__all__ = ["latent_decode", "latent_extend"]
