"""HTTP edge of the service: routes, handlers, request parsing, authentication, metrics."""
