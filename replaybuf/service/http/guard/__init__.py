"""Who may connect and call: connections, their limits and times, origins, tokens, rates."""
