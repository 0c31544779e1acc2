"""Credit assignment for long-horizon language-model agents, in JAX."""

__version__ = "0.1.0"  # as in setup.py; a checkout need not be installed
