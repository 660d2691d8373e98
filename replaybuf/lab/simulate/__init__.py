"""`replaybuf simulate`: a run with a virtual clock, through the code that the service decides with.

`workload` says what producers and trainer are like, `recording` reads that off a real run, `virtual` is the buffer (the
fold, the book of tickets and the selector of the service, fed with records that no store holds), `loop` moves the
clock, `figures` adds up, `report` and `picture` show, `command` is the command line.
"""
