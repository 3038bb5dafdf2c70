"""strop: turn an open-weights Mixture-of-Experts model into a specialist agent for one environment."""

__version__ = "0.1.0"
