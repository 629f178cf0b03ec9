"""What runs on Spark's workers: spouts and bolts in stages, and what passes between them."""
