"""Tables of sampled rollouts with a value for every token: `--tables`."""
