"""Train an image classifier on several GPUs by synchronous data parallelism."""

import sys

# Here, since every program imports this first; in words that Python 3.6 can read.
if sys.version_info < (3, 11):  # noqa: UP036 - nobody has to install the package.
    sys.stderr.write(f"Python 3.11 is needed; this is {sys.version.split()[0]}.\n")
    raise SystemExit(2)
