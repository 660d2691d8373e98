"""The torch side of replaybuf: a reference trainer, a small engine, weights and checkpoints."""
