"""Request bodies and parameters: read in bounded pieces, decoded, and rejected by name."""
