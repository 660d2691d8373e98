"""Checkpoints of a training: `folders` is what is on disk, `shards` its tensors, `checkpoints` when it is written."""
