"""`replaybuf demo`: one command that trains a small policy through the real parts and shows that it learns.

The demo is a supervisor of real, separate processes that talk only by the public HTTP contract and Redis:
service (with its embedded Valkey), inference engine, generator, trainer. It adds nothing to the path of the data.
"""
