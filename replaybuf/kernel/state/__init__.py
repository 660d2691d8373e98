"""State of a run: the fold of its two streams, its tickets, and questions to them."""
