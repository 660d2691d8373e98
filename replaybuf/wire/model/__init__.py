"""Folders of models: the sizes of a model, and the checkpoints of a training."""
