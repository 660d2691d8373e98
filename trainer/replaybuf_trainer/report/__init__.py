"""What a person sees of a training: figures of each step, time by phase."""
