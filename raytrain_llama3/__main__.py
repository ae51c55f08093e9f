"""`python -m raytrain_llama3` is the command `raytrain-llama3`."""

import sys

from raytrain_llama3.cli import main

if __name__ == "__main__":
    sys.exit(main())
