"""Causal language models on packed rows: loading, the forward pass, logprobs of target tokens."""
