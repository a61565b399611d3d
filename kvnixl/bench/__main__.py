import sys

from kvnixl.bench.cli import main

# Child processes import this module too, under another name.
if __name__ == "__main__":
    sys.exit(main())
