"""Routers of transformers' MoE families: what their ids mean, capture and replay by module identity."""
