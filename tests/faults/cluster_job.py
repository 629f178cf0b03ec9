"""A driver of a fault job on a standalone cluster, whose workers have nothing of this host.

python cluster_job.py config.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import fault_job
from pyspark import cloudpickle
from pyspark.sql import SparkSession

CONF = {
    "spark.driver.bindAddress": os.environ["SPARK_LOCAL_IP"],
    "spark.driver.host": os.environ["SPARK_LOCAL_IP"],
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    # An executor on each worker, and room for those of another driver.
    "spark.executor.cores": "1",
    "spark.cores.max": "2",
    "spark.executor.heartbeatInterval": "4s",
    # A host that is silent for so long is lost.
    "spark.network.timeout": "30s",
    "spark.network.timeoutInterval": "5s",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.shuffle.compress": "false",
}


def main(path: str) -> None:
    """Run the job that a file describes, and write what it says of itself beside it."""
    cloudpickle.register_pickle_by_value(fault_job)
    config = json.loads(Path(path).read_text())
    builder = SparkSession.builder.master(config["master"]).appName(config["name"])
    for name, value in CONF.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    said = fault_job.run_job(spark, config)
    Path(config["result"]).write_text(json.dumps(said))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
