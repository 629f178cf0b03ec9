# Columns and counts, for each of the extension modules.

cdef inline Py_ssize_t rows(cnp.ndarray column) noexcept:
    return cnp.PyArray_DIM(column, 0)


cdef cnp.ndarray new_column(Py_ssize_t n, int typenum):
    cdef cnp.npy_intp shape = n
    return cnp.PyArray_EMPTY(1, &shape, typenum, 0)


cdef int64_t as_count(object value, str name, int64_t least, int64_t most) except? -1:
    cdef int overflow = 0
    cdef long long count
    if PyLong_CheckExact(value):
        count = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow == 0 and least <= count <= most:
            return count
    return _columns.as_count(value, name, least, most)
