"""jaxrec: train recommendation and ads-ranking models in JAX, and see where the time goes."""

__version__ = "0.1.0"
