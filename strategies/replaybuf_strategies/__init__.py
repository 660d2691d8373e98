"""Strategies and filters that come with replaybuf, found by entry point like any other plug-in."""
