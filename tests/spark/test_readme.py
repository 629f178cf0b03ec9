"""The README's sessions on Spark."""


def test_the_sessions_on_spark_in_the_readme_are_true(run_readme, spark, tmp_path):
    """Each runs by itself, given a session and an empty folder, and prints what the README says."""
    run_readme(on_spark=True, spark=spark, folder=tmp_path)
