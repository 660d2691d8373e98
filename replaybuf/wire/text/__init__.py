"""Tokens as text: the tokenizer of a model, and the pieces of a text."""
