"""Commands for the person who operates a service."""
