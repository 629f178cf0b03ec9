"""The README's sessions on Spark."""


def test_the_sessions_on_spark_in_the_readme_are_true(run_readme, spark, tmp_path):
    """Each runs by itself, given a session and an empty folder, and prints what the README says."""
    run_readme(on_spark=True, spark=spark, folder=tmp_path)


def test_the_session_from_kafka_to_kafka_is_true(run_readme, spark, kafka_broker, tmp_path):
    for topic in ("orders", "totals", "orders-dead"):
        kafka_broker.create_topic(topic)
    servers = kafka_broker.bootstrap_servers
    run_readme(on_spark=True, on_kafka=True, spark=spark, folder=tmp_path, servers=servers)
    assert len(kafka_broker.consume("orders-dead")) == 2
