"""Clients of the service: calls, batch readers, direct mode, unpacking of packed rows."""
