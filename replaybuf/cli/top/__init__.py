"""The command `replaybuf top`: a live view of all runs, and of the flow of one run."""
