"""`replaybuf simulate`: strategies on a virtual clock, with the decisions of the service.

`workload` draws groups, `recording` reads them from a real run, `virtual` is the run without a store, `loop` moves the
clock, `figures` adds up, `report` and `picture` show, `command` is the command line.
"""
