"""Arithmetic over very many byte ranges: their order, their sizes, their layout in memory.

While it runs, a device waits for bytes. An *item* is a tuple whose first field is a name, and whose
last three are shard, offset and nbytes, such as a ByteRange or a TensorInfo. Not responsible for
decisions: those are gdsload.planning's.
"""

from cpython.tuple cimport PyTuple_Check, PyTuple_Size
from libc.stdint cimport int64_t, uint64_t

from operator import attrgetter

_file_order = attrgetter("shard", "offset")

cdef struct Range:
    int64_t shard
    int64_t offset
    int64_t nbytes


cdef Py_ssize_t length_of(object item) except -1:
    cdef Py_ssize_t length = PyTuple_Size(item) if PyTuple_Check(item) else 0
    if length < 4:
        raise TypeError(f"{item!r} is no byte range")
    return length


cdef int64_t nbytes_of(object item) except? -1:
    return (<tuple>item)[length_of(item) - 1]


cdef int read_range(object item, Range *into) except -1:
    cdef Py_ssize_t length = length_of(item)
    into.shard = (<tuple>item)[length - 3]
    into.offset = (<tuple>item)[length - 2]
    into.nbytes = (<tuple>item)[length - 1]
    return 0


def in_file_order(list items):
    """The items by shard and offset: the same list if they are in this order already."""
    cdef Range each
    cdef int64_t shard = -1, offset = -1
    for item in items:
        read_range(item, &each)
        if each.shard < shard or (each.shard == shard and each.offset < offset):
            return sorted(items, key=_file_order)
        shard, offset = each.shard, each.offset
    return items


def bytes_of(list items):
    """The bytes of all items."""
    cdef int64_t total = 0
    for item in items:
        total += nbytes_of(item)
    return total


def end_of(list items, Py_ssize_t first, int64_t nbytes):
    """The end (excluded) of the fewest items from ``first`` on that have ``nbytes`` bytes or more:
    that of the list if all have less."""
    cdef Py_ssize_t end = first
    while end < len(items) and nbytes > 0:
        nbytes -= nbytes_of(items[end])
        end += 1
    return end


def rounded(list items, int64_t least, int64_t unit):
    """(number, bytes) of the items of ``least`` bytes or more, each rounded up to ``unit`` bytes."""
    cdef int64_t nbytes, total = 0, count = 0
    for item in items:
        nbytes = nbytes_of(item)
        if nbytes >= least:
            total += (nbytes + unit - 1) // unit * unit
            count += 1
    return count, total


def merged(list ordered, int64_t gap):
    """Items in file order, joined over gaps of up to ``gap`` bytes: (shard, start, end, the items)
    of each range; and the empty items, which are in none. Items that overlap are not joined: each
    has bytes of its own, because the first that is freed takes its bytes with it."""
    cdef Range each
    cdef int64_t shard = -1, start = 0, end = 0
    cdef list found = [], inside = [], empty = []
    for item in ordered:
        read_range(item, &each)
        if each.nbytes == 0:
            empty.append(item)
            continue
        if each.shard != shard or each.offset - end > gap or each.offset < end:
            if inside:
                found.append((shard, start, end, inside))
            shard, start, end, inside = each.shard, each.offset, 0, []
        inside.append(item)
        end = each.offset + each.nbytes
    if inside:
        found.append((shard, start, end, inside))
    return found, empty


def laid_out(list items, int64_t align, int64_t most):
    """Items side by side, each aligned, in groups of at most ``most`` bytes or of one larger item:
    (bytes of the group, {name: offset in it}). Empty items are left out."""
    cdef int64_t room, length = 0
    groups, offsets = [], {}
    for item in items:
        room = (nbytes_of(item) + align - 1) // align * align
        if room == 0:
            continue
        if offsets and length + room > most:
            groups.append((length, offsets))
            length, offsets = 0, {}
        offsets[item[0]] = length
        length += room
    if offsets:
        groups.append((length, offsets))
    return groups


def shares(object members, dict addresses, Py_ssize_t targets, object range_of):
    """For each of the ``targets``, the (offset in it, bytes, device address) of its items, in as few
    shares as possible.

    ``members``: (items in file order, number of their target, its file offset, ...), those of one
    target in a row; no item is empty. ``addresses``: where an item goes, by its name. ``range_of``:
    returns (start, bytes) of the allocation around an address: no copy may cross from one allocation to
    the next, even if they are neighbours.
    """
    cdef Range each
    cdef Py_ssize_t number, last = -1
    cdef int64_t base, start = 0, held = 0
    cdef uint64_t address, to = 0, limit = 0  # of the allocation; 0: not known yet
    found = [[] for _ in range(targets)]
    for items, number, base, *_ in members:
        for item in items:
            read_range(item, &each)
            address = addresses[item[0]]
            if number == last and each.offset - base == start + held and address == to + held:
                if limit == 0:
                    allocated, length = range_of(to)
                    limit = allocated + length
                if address + each.nbytes <= limit:
                    held += each.nbytes
                    continue
            if held > 0:
                found[last].append((start, held, to))
            last, start, held, to, limit = number, each.offset - base, each.nbytes, address, 0
    if held > 0:
        found[last].append((start, held, to))
    return found
