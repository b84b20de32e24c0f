"""What latent attention does to queries and latents around attention over pages, by kernels.

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) in its absorbed form: a
token's latent and the key that all heads share are one key in the pool, and each head's key matrix
goes into its queries. In plain jax the model family computes it by itself: here is no other body.
"""

from __future__ import annotations

from pallas_kernels.latent_attention.triton_queries import absorbed_queries
from pallas_kernels.latent_attention.triton_write import norm_and_write

__all__ = ["absorbed_queries", "norm_and_write"]
