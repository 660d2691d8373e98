"""Start and supervise all parts of a run on one machine, for `replaybuf up` and `replaybuf demo`."""
