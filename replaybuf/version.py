"""Release of the package, for modules that `replaybuf` itself imports."""

__version__ = "0.1.0"
