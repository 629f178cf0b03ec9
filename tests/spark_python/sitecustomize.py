"""Settings for the Pythons that Spark starts in tests: `conftest.py` puts this into their path.

Spark puts zip files of PySpark in front of the installed PySpark.  Each daemon would compile their
modules again, and each task would read their directories again.  Workers are forked by a daemon:
what it has loaded, they have.  After each task, a worker collects garbage among all its objects,
also among those of the daemon.
"""

import gc
import os
import sys
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder

TASKS = [f"ackcore.spark.tasks.{stage}_stage" for stage in ("spout", "bolt", "settle")]

if any(word.startswith("pyspark.") for word in sys.orig_argv):
    places = [place for place in sys.path if not place.endswith(".zip")]
    if PathFinder.find_spec("pyspark", places):
        for place in {*sys.path} - {*places}:
            sys.path_importer_cache.pop(place, None)
        sys.path[:] = places
    os.register_at_fork(before=gc.freeze)
    if "pyspark.worker" in sys.orig_argv:
        with suppress(Exception):  # some tests take ackcore or pandas away from workers
            for name in ("pandas", "pyarrow.parquet", *TASKS):
                import_module(name)
