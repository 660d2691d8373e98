"""The command line: `main` wires the commands, each other module holds one command."""
