"""Loading of plug-ins by entry point, and the time limit on their calls. Knows no strategy and no run."""
