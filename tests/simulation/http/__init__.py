"""HTTP between producers and simulated servers: the client and the server of the product, on a simulated network."""
