"""Strategies, filters and admission plug-ins: their contracts, what they see, and what follows from their answers."""
