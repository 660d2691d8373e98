"""The table of calls, one module of handlers per group of calls, metrics, and the files of the console."""
