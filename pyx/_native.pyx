# cython: language_level=3, embedsignature=True, autotestdict=False
# cython: wraparound=False, boundscheck=False, initializedcheck=False
# cython: freethreading_compatible=True
"""The compiled core: ids in bulk.

Each column call has three stages: check and convert, allocate, then loops that run without
the GIL and cannot fail.  Nothing is copied on the way in.
"""

cimport cython
cimport numpy as cnp
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.number cimport PyIndex_Check
from cpython.unicode cimport PyUnicode_CheckExact
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport (
    INT32_MAX, INT64_MAX, INT64_MIN, SIZE_MAX, UINT64_MAX, int32_t, int64_t, uint8_t, uint64_t,
)
from libc.string cimport memset

from ids cimport (
    ATTEMPT_BITS, OFFSET_BITS, PARTITION_BITS, acker_of, biject, bijection_t, edge_key,
    edge_key_t, edge_ordinal, edge_parent, edge_root, position, root_bijection, source_bijection,
)
from kernel cimport *

import os

import numpy as np

from ackcore import _columns, _records
from ackcore import _id_parts as parts

cnp.import_array()


# Arguments: the common types here, all others (and all refusals) through ackcore._columns,
# so that what is accepted, and the words for what is not, are those of the Python backend.

cdef cnp.ndarray id_column(object column, str name):
    """A 64-bit column as an array that shares its memory; items may be signed or not."""
    if cnp.PyArray_CheckExact(column) and cnp.PyArray_NDIM(column) == 1:
        if cnp.PyArray_ISCARRAY_RO(column):
            if cnp.PyArray_TYPE(column) in (cnp.NPY_INT64, cnp.NPY_UINT64):
                return column
    return _columns.id_column(column, name)


cdef cnp.ndarray task_column(object column, str name):
    """A 32-bit column as an array that shares its memory."""
    if cnp.PyArray_CheckExact(column) and cnp.PyArray_NDIM(column) == 1:
        if cnp.PyArray_ISCARRAY_RO(column) and cnp.PyArray_TYPE(column) == cnp.NPY_INT32:
            return column
    return _columns.task_column(column, name)


cdef inline Py_ssize_t rows(cnp.ndarray column) noexcept:
    return cnp.PyArray_DIM(column, 0)


cdef inline const uint64_t *ids_of(cnp.ndarray column) noexcept:
    return <const uint64_t *>cnp.PyArray_DATA(column)


cdef inline const int32_t *tasks_of(cnp.ndarray column) noexcept:
    return <const int32_t *>cnp.PyArray_DATA(column)


cdef cnp.ndarray new_column(Py_ssize_t n, int typenum):
    cdef cnp.npy_intp shape = n
    return cnp.PyArray_EMPTY(1, &shape, typenum, 0)


cdef uint64_t as_id(object value, str name) except? 0:
    """64 bits from a Python integer of either sign."""
    cdef int overflow = 0
    cdef long long bits
    if PyLong_CheckExact(value):
        bits = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow == 0:
            return <uint64_t>bits
    return <uint64_t><int64_t>_columns.as_id(value, name)


cdef int64_t as_count(object value, str name, int64_t least, int64_t most) except? -1:
    """An integer in least..most."""
    cdef int overflow = 0
    cdef long long count
    if PyLong_CheckExact(value):
        count = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow == 0 and least <= count <= most:
            return count
    return _columns.as_count(value, name, least, most)


include "ids.pxi"
include "ledger.pxi"
include "pack.pxi"
