"""`python -m hf_packfree` is the command `packfree`."""

import sys

from hf_packfree.cli import main

if __name__ == "__main__":
    sys.exit(main())
