"""Destinations of the figures of a training, one module each behind `sink.Sink`."""
