"""Per-record delivery guarantees for PySpark, on Storm's XOR acker compiled for Python."""

__version__ = "0.1.0"
