"""The contract of a backend for reads into VRAM, over doubles of CUDA and cuFile."""

from __future__ import annotations

import gpudoubles
from gdsload.backends.cufile.gds import GdsBackend
from gdsload.backends.cufile.gds_mt import GdsMtBackend
from gdsload.backends.posix import PosixBackend
from gdsload.backends.posix.engines import ENGINES
from gpucontract import suite

for _direct in (False, True):
    _way = "Direct" if _direct else "Buffered"
    for _engine in ENGINES:
        _name = f"TestPosix{_engine.title()}{_way}"
        globals()[_name] = suite(_name, PosixBackend, direct=_direct, options={"engine": _engine})
    for _label, _kind in (("Gds", GdsBackend), ("GdsMt", GdsMtBackend)):
        globals()[f"Test{_label}{_way}"] = suite(f"Test{_label}{_way}", _kind, direct=_direct)

TestGdsCompat = suite(
    "TestGdsCompat",
    GdsBackend,
    direct=True,
    options={"allow_compat": True},
    machine={"native": gpudoubles.COMPAT},
)
TestGdsP2P = suite("TestGdsP2P", GdsBackend, direct=True, machine={"native": gpudoubles.P2P})
TestGdsMtOldest = suite("TestGdsMtOldest", GdsMtBackend, machine={"version": 1110})
TestGdsMtNewest = suite("TestGdsMtNewest", GdsMtBackend, machine={"version": 1200})
TestGdsMtFewSlots = suite(
    "TestGdsMtFewSlots", GdsMtBackend, options={"ring_bytes": 128 << 10}, machine={"patience": 40}
)
TestPosixSlowCopies = suite("TestPosixSlowCopies", PosixBackend, machine={"patience": 40})
