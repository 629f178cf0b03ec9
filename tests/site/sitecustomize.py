"""Settings for the Pythons that Spark starts in tests: `conftest.py` puts this into their path.

Spark puts a zip file of PySpark in front of the installed PySpark, and each daemon would compile
its modules again.  After each task, a worker collects garbage among all objects that are loaded.
"""

import gc
import os
import sys

if any(word.startswith("pyspark.") for word in sys.orig_argv):
    sys.path.sort(key=lambda place: place.endswith(".zip"))
    os.register_at_fork(before=gc.freeze)
