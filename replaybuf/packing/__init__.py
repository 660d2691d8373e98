"""Packing of rollouts into micro-batches, balance of ranks, cost model."""
