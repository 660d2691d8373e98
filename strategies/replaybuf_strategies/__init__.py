"""The strategies that come with replaybuf: plug-ins like any other, found by entry point."""
