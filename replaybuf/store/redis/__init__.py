"""A Redis server: connection, pipeline, durability, faults, and the embedded Valkey."""
