"""`python -m onnxfuse`."""

import sys

from onnxfuse.commands import main

sys.exit(main())
