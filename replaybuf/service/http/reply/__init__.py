"""Responses: problem documents, JSON in pieces, bodies of batches."""
