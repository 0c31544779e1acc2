"""Prints the credit library, or one method of it: `python -m focus.credit [METHOD]`."""

import sys

from focus.library import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
