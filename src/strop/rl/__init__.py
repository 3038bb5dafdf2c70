"""Reinforcement learning: credit, loss, packing, the trainers, the staleness-bounded loop and evaluation."""
