"""``python -m specdec``: the command line."""

from specdec.cli import main

if __name__ == "__main__":
    main()
