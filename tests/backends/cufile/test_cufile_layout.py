"""Our declarations of cuFile's types and functions, compared with NVIDIA's headers.

The headers are those of the nvidia-cufile packages: the one that torch brought into this
environment, and any below the folders named in GDSLOAD_CUFILE_HEADERS (separated by colons).
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compiled import compiler, cython_module

# The types of CUDA that cufile.h needs.
CUDA_H = """
#ifndef CUDA_STANDIN
#define CUDA_STANDIN
#include <stdint.h>
#include <sys/types.h>
#include <time.h>
typedef int CUresult;
typedef struct CUstream_st *CUstream;
#endif
"""
# Each of our prototypes, to be assigned the function that the header declares.
PROTOTYPES = {
    "cuFileDriverOpen": "CUfileError_t (*{0})(void)",
    "cuFileHandleRegister": "CUfileError_t (*{0})(void **, CUfileDescr_t *)",
    "cuFileHandleDeregister": "void (*{0})(void *)",
    "cuFileBufRegister": "CUfileError_t (*{0})(const void *, size_t, int)",
    "cuFileBufDeregister": "CUfileError_t (*{0})(const void *)",
    "cuFileRead": "int64_t (*{0})(void *, void *, size_t, int64_t, int64_t)",
    "cuFileDriverGetProperties": "CUfileError_t (*{0})(CUfileDrvProps_t *)",
    "cuFileDriverClose": "CUfileError_t (*{0})(void)",
    "cuFileGetVersion": "CUfileError_t (*{0})(int *)",
    "cuFileBatchIOSetUp": "CUfileError_t (*{0})(void **, unsigned)",
    "cuFileBatchIOSubmit": "CUfileError_t (*{0})(void *, unsigned, CUfileIOParams_t *, unsigned)",
    "cuFileBatchIOGetStatus": "CUfileError_t (*{0})(void *, unsigned, unsigned *,"
    " CUfileIOEvents_t *, struct timespec *)",
    "cuFileBatchIODestroy": "void (*{0})(void *)",
}
# Functions of later releases, with the enums and bools of the header.
LATER = {
    "cuFileGetParameterSizeT": "CUfileError_t (*{0})(CUFileSizeTConfigParameter_t, size_t *)",
    "cuFileSetParameterSizeT": "CUfileError_t (*{0})(CUFileSizeTConfigParameter_t, size_t)",
    "cuFileGetParameterBool": "CUfileError_t (*{0})(CUFileBoolConfigParameter_t, bool *)",
    "cuFileSetParameterBool": "CUfileError_t (*{0})(CUFileBoolConfigParameter_t, bool)",
    "cuFileSetParameterString": "CUfileError_t (*{0})(CUFileStringConfigParameter_t, const char *)",
    "cuFileSetStatsLevel": "CUfileError_t (*{0})(int)",
    "cuFileStatsStart": "CUfileError_t (*{0})(void)",
    "cuFileGetStatsL3": "CUfileError_t (*{0})(CUfileStatsLevel3_t *)",
    "cuFileDriverGetP2PFlags": "CUfileError_t (*{0})(CUfileDriverStatusFlags_t,"
    " CUfileP2PFlags_t *)",
}
# Numbers that the code holds, by their name in the header.
NUMBERS = {
    "CU_FILE_HANDLE_TYPE_OPAQUE_FD": 1,
    "CUFILE_READ": 0,
    "CUFILE_BATCH": 1,
    "CUFILE_INVALID": 4,
    "CUFILE_CANCELED": 8,
    "CUFILE_COMPLETE": 16,
    "CUFILE_TIMEOUT": 32,
    "CUFILE_FAILED": 64,
    "CU_FILE_NVME_SUPPORTED": 4,
}
LATER_NUMBERS = {
    "CUFILE_PARAM_PROPERTIES_MAX_DIRECT_IO_SIZE_KB": 5,
    "CUFILE_PARAM_PROPERTIES_MAX_DEVICE_CACHE_SIZE_KB": 6,
    "CUFILE_PARAM_PROPERTIES_PER_BUFFER_CACHE_SIZE_KB": 7,
    "CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE": 9,
    "CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE": 1,
    "CUFILE_PARAM_EXECUTION_PARALLEL_IO": 4,
    "CUFILE_PARAM_USE_PCIP2PDMA": 7,
    "CUFILE_PARAM_LOG_DIR": 2,
    "CU_FILE_P2P_SUPPORTED": 4,
}
GPU_FIELDS = {
    "read_bytes": "read_bytes",
    "reads": "n_total_reads",
    "p2p": "n_p2p_reads",
    "nvfs": "n_nvfs_reads",
    "posix": "n_posix_reads",
    "unaligned": "n_unaligned_reads",
    "errors": "n_reads_err",
}


def headers() -> list[Path]:
    folders = [*sys.path, *os.environ.get("GDSLOAD_CUFILE_HEADERS", "").split(":")]
    found = [
        Path(path)
        for folder in filter(None, folders)
        for pattern in ("nvidia/*/include/cufile.h", "*/nvidia/*/include/cufile.h")
        for path in glob.glob(os.path.join(folder, pattern))
    ]
    return sorted({path.resolve() for path in found})


def name_of(header: Path) -> str:
    """The version of the package if it is known, else the path."""
    found = re.search(r"cufile[\w-]*?-(\d[\d.]+\d)", str(header))
    if found:
        return found[1]
    infos = glob.glob(str(header.parents[3] / "nvidia_cufile*-*.dist-info"))
    return re.sub(r".*-([\d.]+)\.dist-info", r"\1", infos[0]) if infos else str(header)


HEADERS = headers()
if not HEADERS:
    pytest.skip("no cufile.h: the nvidia-cufile package is not installed", allow_module_level=True)


@pytest.fixture(params=HEADERS, ids=name_of)
def header(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def ask(header: Path, folder: Path, body: str) -> dict[str, int]:
    """The names and numbers that a C program prints which includes the header."""
    (folder / "cuda.h").write_text(CUDA_H)
    source, program = folder / "ask.c", folder / "ask"
    source.write_text(
        f'#include <stdio.h>\n#include <stddef.h>\n#include "{header}"\n'
        '#define SAY(name, value) printf("%s %lld\\n", name, (long long)(value))\n'
        f"{body}"
    )
    command = [
        compiler(),
        "-w",
        "-D_GNU_SOURCE",
        "-Werror=incompatible-pointer-types",
        f"-I{folder}",
        str(source),
        "-o",
        str(program),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    out = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in (line.split() for line in out.splitlines())}


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cython_module(Path(__file__).with_name("layout.pyx"), tmp_path_factory.mktemp("layout"))


def test_struct_layouts_equal_the_header(header: Path, tmp_path: Path, declared: Any) -> None:
    ours = declared.layout()
    lines = [
        f'SAY("{name}", offsetof({name.partition(".")[0]}, {name.partition(".")[2]}));'
        if "." in name
        else f'SAY("{name}", sizeof({name}));'
        for name in ours
    ]
    assert ask(header, tmp_path, "int main() {" + "\n".join(lines) + "}") == ours


def test_function_prototypes_equal_the_header(header: Path, tmp_path: Path) -> None:
    text = header.read_text()
    wanted = dict(PROTOTYPES)
    wanted.update({name: proto for name, proto in LATER.items() if f"{name}(" in text})
    # Declared, not called: nothing of cuFile is linked. A misfit does not compile.
    lines = [
        f"extern typeof({name}) {name} __attribute__((weak));\n"
        f"{proto.format('our_' + name)} = {name};"
        for name, proto in wanted.items()
    ]
    assert ask(header, tmp_path, "\n".join(lines) + '\nint main() { SAY("fits", 1); }') == {
        "fits": 1
    }


def test_constants_equal_the_header(header: Path, tmp_path: Path) -> None:
    text = header.read_text()
    wanted = dict(NUMBERS)
    wanted.update({name: value for name, value in LATER_NUMBERS.items() if name in text})
    lines = [f'SAY("{name}", {name});' for name in wanted]
    assert ask(header, tmp_path, "int main() {" + "\n".join(lines) + "}") == wanted


def test_statistics_offsets_equal_the_header(header: Path, tmp_path: Path, declared: Any) -> None:
    if "CUfileStatsLevel3" not in header.read_text():
        pytest.skip(f"cuFile {name_of(header)} has no statistics: they came with 1.15")
    version = 1190 if "readv_ops" in header.read_text() else 1150
    ours = declared.statistics_layout(version)
    room = ours.pop("room")
    lines = ['SAY("all", sizeof(CUfileStatsLevel3_t));']
    for name in ours:
        struct, _, field = name.partition(".")
        if struct == "CUfilePerGpuStats_t" and field:
            field = GPU_FIELDS[field]
        what = f"offsetof({struct}, {field})" if field else f"sizeof({struct})"
        lines.append(f'SAY("{name}", {what});')
    theirs = ask(header, tmp_path, "int main() {" + "\n".join(lines) + "}")
    assert theirs.pop("all") <= room // 8  # it has grown once, and is written whole
    assert theirs == ours
