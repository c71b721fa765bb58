# cython: language_level=3
"""Sizes and offsets of the structs shared with libcufile, as the native modules declare them. The
test compiles it.
"""

from gdsload._native.cufile cimport (
    GPU_BYTES,
    HISTOGRAM_BYTES,
    LEVEL_1_BYTES,
    LEVEL_1_BYTES_1190,
    STATS_BYTES,
    CUfileDescr,
    CUfileDrvProps,
    CUfileError,
    CUfileIOEvents,
    CUfileIOParams,
)

from gdsload._native.cufile import GPU_FIELDS


def layout():
    """Sizes of the structs shared with libcufile, and offsets of their fields."""
    cdef CUfileDescr descr
    cdef CUfileDrvProps props
    cdef CUfileIOParams params
    cdef CUfileIOEvents events
    return {
        "CUfileError_t": sizeof(CUfileError),
        "CUfileDescr_t": sizeof(CUfileDescr),
        "CUfileDescr_t.handle": <char *>&descr.handle - <char *>&descr,
        "CUfileDescr_t.fs_ops": <char *>&descr.fs_ops - <char *>&descr,
        "CUfileDrvProps_t": sizeof(CUfileDrvProps),
        "CUfileDrvProps_t.nvfs.dstatusflags":
            <char *>&props.nvfs.dstatusflags - <char *>&props,
        "CUfileDrvProps_t.fflags": <char *>&props.fflags - <char *>&props,
        "CUfileDrvProps_t.max_device_cache_size":
            <char *>&props.max_device_cache_size - <char *>&props,
        "CUfileDrvProps_t.per_buffer_cache_size":
            <char *>&props.per_buffer_cache_size - <char *>&props,
        "CUfileDrvProps_t.max_batch_io_size": <char *>&props.max_batch_io_size - <char *>&props,
        "CUfileIOParams_t": sizeof(CUfileIOParams),
        "CUfileIOParams_t.u.batch.devPtr_base":
            <char *>&params.u.batch.devPtr_base - <char *>&params,
        "CUfileIOParams_t.u.batch.file_offset":
            <char *>&params.u.batch.file_offset - <char *>&params,
        "CUfileIOParams_t.u.batch.devPtr_offset":
            <char *>&params.u.batch.devPtr_offset - <char *>&params,
        "CUfileIOParams_t.u.batch.size": <char *>&params.u.batch.size - <char *>&params,
        "CUfileIOParams_t.fh": <char *>&params.fh - <char *>&params,
        "CUfileIOParams_t.opcode": <char *>&params.opcode - <char *>&params,
        "CUfileIOParams_t.cookie": <char *>&params.cookie - <char *>&params,
        "CUfileIOEvents_t": sizeof(CUfileIOEvents),
        "CUfileIOEvents_t.status": <char *>&events.status - <char *>&events,
        "CUfileIOEvents_t.ret": <char *>&events.ret - <char *>&events,
    }


def statistics_layout(int version):
    """Offsets and sizes assumed in CUfileStatsLevel3_t."""
    level_1 = LEVEL_1_BYTES_1190 if version >= 1190 else LEVEL_1_BYTES
    return {
        "CUfileStatsLevel1_t": level_1,
        "CUfileStatsLevel2_t": level_1 + HISTOGRAM_BYTES,
        "CUfilePerGpuStats_t": GPU_BYTES,
        "CUfileStatsLevel3_t.num_gpus": level_1 + HISTOGRAM_BYTES,
        "CUfileStatsLevel3_t.per_gpu_stats": level_1 + HISTOGRAM_BYTES + 8,
        "room": STATS_BYTES,
        **{f"CUfilePerGpuStats_t.{name}": place for name, place in GPU_FIELDS},
    }
