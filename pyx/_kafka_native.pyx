# cython: language_level=3, embedsignature=True, autotestdict=False
# cython: wraparound=False, boundscheck=False, initializedcheck=False
# cython: freethreading_compatible=True
"""Messages of a Kafka client as columns. Without it, `ackcore.kafka` uses its Python twin."""

cimport cython
cimport numpy as cnp
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t, uintptr_t

from ackcore import _arguments, _columns, _records

cnp.import_array()

include "columns.pxi"
include "raw_messages.pxi"
include "record_buffers.pxi"
