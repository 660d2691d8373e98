"""Batch bodies: fetch the groups of a batch, pack them, write one body per rank."""
