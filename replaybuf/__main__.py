"""Entry point of `python -m replaybuf`."""

from replaybuf.cli.main import main

if __name__ == "__main__":
    main()
