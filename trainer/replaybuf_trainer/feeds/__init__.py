"""Feeds: where a trainer takes its batches from and reports its progress to."""
