"""The process that runs tasksets of verifiers: `PYTHON -P tasksets/worker/__main__.py`. Started by `TasksetProcess`.

Its interpreter may be another than the generator's, so that imports here are the standard library, msgspec and what
verifiers brings, and those only once the process runs: its parent takes `messages` from this package. There is no
`replaybuf` in that interpreter; imports between the modules of this package are relative therefore.

Requests come by standard input and answers leave by standard output, msgpack behind their length (4 bytes,
little-endian). An answer has the number of its request; 0 is the process itself, which says first that it is ready.
Whatever a taskset prints goes to standard error. The process ends when its standard input does, in the middle of a
reward too, so that none outlives a generator that was killed.

===========  =================================================================
`messages`   what is asked and answered
`process`    requests come in, run side by side, answers go out
`loaded`     one taskset: its rows, and the scores of replies
`playing`    one taskset whose tasks are played in turns, by verifiers itself
`plays`      one play: turns that are asked for here and sampled elsewhere
`chat`       the loop of a play between model and tools
`rendering`  conversations to token ids
===========  =================================================================
"""
