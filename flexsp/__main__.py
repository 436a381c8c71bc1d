"""`python -m flexsp`."""

import sys

from flexsp.launch.cli import main

sys.exit(main())
