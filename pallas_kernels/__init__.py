"""Attention and cache kernels. Imports jax only; every operation has a twin in plain jnp."""
