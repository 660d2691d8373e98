"""Strategies: their contract, what they see, and the batches and waits that follow from their answers."""
