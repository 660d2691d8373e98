"""Entry point of `python -m replaybuf`."""

from replaybuf.cli.main import main
from replaybuf.launch.guard import tie_to_parent

if __name__ == "__main__":
    tie_to_parent()
    main()
