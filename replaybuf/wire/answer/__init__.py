"""What a person or a program reads of a run: state, groups, batches, cursors, evaluations."""
