"""The process that runs tasksets of verifiers: `PYTHON -P __main__.py PIPES`, started by `TasksetProcess`.

Its interpreter may be another than the generator's, and need not have `replaybuf`. So the modules here import only the
standard library, msgspec and what verifiers brings, and import each other relatively. PIPES is the file of
`replaybuf.wire.pipes`. `messages` imports no verifiers: the generator uses it too.

The process reports first that it is ready. Prints of a taskset go to standard error. The process ends when its
standard input ends, in the middle of a reward too, so it does not outlive a killed generator.

===========  ==============================================================
`messages`   requests, answers and errors
`process`    runs requests side by side
`loaded`     one taskset: its rows, and the scores of replies
`traces`     conversion between tasks, replies and traces of verifiers
`playing`    one taskset whose tasks verifiers plays in turns
`plays`      one play: its turns are sampled by the generator
`chat`       the loop of a play between model and tools
`rendering`  conversations to token ids
===========  ==============================================================
"""
