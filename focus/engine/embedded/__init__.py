"""The engine in this process: a batching sampler in JAX."""
