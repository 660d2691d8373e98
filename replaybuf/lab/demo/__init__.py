"""`replaybuf demo`: train a small policy with all parts on one machine.

The demo supervises separate processes: service (with its embedded Valkey), inference engine, generator and trainer.
They talk only by the public HTTP contract and Redis, as in production.
"""
