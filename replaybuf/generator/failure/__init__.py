"""Failures of groups: rollouts that are lost, pauses before the next try, and the failure that ends a process."""
