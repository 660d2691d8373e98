"""How far the streams of runs are known to reach, so that a loss of acknowledged data is noticed."""
