"""The service: one process that owns the decisions about its runs and answers over HTTP."""
