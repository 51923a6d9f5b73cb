"""Choosing, finding and opening libraries: NVIDIA's own, small ones made here, and what is none at all."""

from __future__ import annotations

import ast
import ctypes
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pynccl.abi import (
    HOST_PROTOTYPES,
    PROTOTYPES,
    EncryptionMode,
    Gpu,
    Gpus,
    InvalidArgumentError,
    InvalidUsageError,
    Library,
    LibraryNotFoundError,
    MissingFunctionError,
    check,
    coverage,
    driver,
    library,
    load,
    ncclEncryptionConfig_t,
    ncclUniqueId,
    version_code,
    version_string,
)

Make = Callable[[str, str], Path]

VERSION = "int ncclGetVersion(int *v) { *v = VERSION; return 0; }\n"


def release(code: int) -> str:
    return VERSION.replace("VERSION", str(code))


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Compile C source into a shared library of this name."""

    def build(name: str, source: str) -> Path:
        (tmp_path / f"{name}.c").write_text(source)
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", name, f"{name}.c"]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
        return tmp_path / name

    return build


def python(code: str, **environ: str) -> str:
    """What a new process prints, with only these variables more than the tests' own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


# --- NVIDIA's library, which loads without a GPU ------------------------------------------------------------


def test_nccl_is_found_in_its_wheel_with_every_function() -> None:
    lib = load("nccl")
    assert (lib.kind, lib.version, lib.version_string) == ("nccl", 23203, "2.32.3")
    assert os.path.basename(lib.path) == "libnccl.so.2"
    assert lib.missing() == []
    assert lib.searched[-1][1] == f"found {lib.path}"


def test_every_function_resolves_with_the_types_of_the_table() -> None:
    lib = load("nccl")
    for name, prototype in PROTOTYPES.items():
        function = getattr(lib, name)
        assert (function.argtypes, function.restype) == (prototype.argtypes, prototype.restype)
        assert getattr(lib, name) is function


def test_a_path_and_a_name_give_the_same_object() -> None:
    lib = load("nccl")
    assert load(lib.path) is lib
    assert load(Path(lib.path)) is lib
    assert load(lib) is lib
    assert pickle.loads(pickle.dumps(lib)) is lib


def test_loading_libnccl_makes_nothing_visible_to_other_libraries() -> None:
    code = "import ctypes, pynccl.abi as abi; abi.load('nccl'); print(hasattr(ctypes.CDLL(None), 'ncclSend'))"
    assert python(code) == "False"


def test_calls_reach_the_library_and_a_wrong_type_does_not() -> None:
    lib = load("nccl")
    assert lib.ncclGetErrorString(4).startswith(b"invalid argument")
    with pytest.raises(ctypes.ArgumentError):
        lib.ncclGetVersion(ctypes.byref(ctypes.c_double()))


# --- libraries of other ages and makers ---------------------------------------------------------------------


def test_an_older_library_loads_and_says_what_it_is_too_old_for(make: Make) -> None:
    lib = load(make("libnccl.so.2", release(22105)))
    assert (lib.kind, lib.version_string) == ("nccl", "2.21.5")
    assert lib.has("ncclGetVersion") and not lib.has("ncclPutSignal")
    assert "ncclPutSignal" in lib.missing() and "ncclGetVersion" not in lib.missing()
    with pytest.raises(MissingFunctionError) as caught:
        _ = lib.ncclPutSignal
    assert f"ncclPutSignal needs NCCL 2.29, the loaded library is 2.21.5 ({lib.path})" in str(caught.value)
    assert caught.value.call == "ncclPutSignal"


def test_a_new_library_without_a_function_is_not_called_too_old(make: Make) -> None:
    lib = load(make("librccl.so.1", release(23000)))
    assert lib.kind == "other"
    with pytest.raises(
        MissingFunctionError, match=r"in NCCL since 2.29, but the loaded library is 2.30.0 .*export"
    ):
        _ = lib.ncclPutSignal
    assert not hasattr(lib, "ncclPutSignal")


def test_what_no_header_has_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="ncclAllReduceAndMore"):
        _ = load("nccl").ncclAllReduceAndMore


def test_the_host_library_is_known_by_its_own_function(make: Make) -> None:
    source = release(23203) + 'const char *pyncclVersion(void) { return "made here"; }\n'
    lib = load(make("libnccl.so.2", source))
    assert lib.kind == "host"
    assert lib.pyncclVersion() == b"made here"
    with pytest.raises(MissingFunctionError, match="older build"):
        _ = lib.pyncclStreamCreate


def test_functions_of_the_host_library_are_missing_elsewhere_for_another_reason() -> None:
    with pytest.raises(
        MissingFunctionError, match="pyncclStreamCreate exists only in pynccl's host library.*2.32.3"
    ):
        _ = load("nccl").pyncclStreamCreate


def test_two_libraries_are_live_at_once_and_answer_for_themselves(make: Make) -> None:
    # Same soname and same symbols: only RTLD_LOCAL and absolute paths keep them apart.
    mine, theirs = load(make("libnccl.so.2", release(22105))), load("nccl")
    version = ctypes.c_int()
    for lib, code in ((mine, 22105), (theirs, 23203), (mine, 22105)):
        assert lib.ncclGetVersion(ctypes.byref(version)) == 0
        assert version.value == code


def test_types_set_on_one_handle_are_not_seen_through_another() -> None:
    lib = load("nccl")
    assert lib.ncclGetLastError.restype is ctypes.c_char_p
    assert ctypes.CDLL(lib.path).ncclGetLastError.restype is ctypes.c_int


def test_other_threads_run_while_a_call_waits(make: Make) -> None:
    # ncclGroupStart returns only after another thread's ncclGroupEnd: with the GIL held it never would.
    path = make(
        "libwait.so",
        release(23203)
        + "#include <unistd.h>\nstatic _Atomic int go, in;\n"
        + "int ncclGroupStart(void) { in = 1; while (!go) usleep(100); return 0; }\n"
        + "int ncclGroupEnd(void) { while (!in) usleep(100); go = 1; return 0; }\n",
    )
    code = f"""
import threading, pynccl.abi as abi
lib = abi.load({str(path)!r})
waiting = threading.Thread(target=lib.ncclGroupStart)
waiting.start(); lib.ncclGroupEnd(); waiting.join(); print("both")
"""
    assert python(code) == "both"


# --- what cannot be opened ----------------------------------------------------------------------------------


def test_a_missing_file_is_named() -> None:
    with pytest.raises(
        LibraryNotFoundError, match=r"cannot open /no/such/libnccl.so(.|\n)*No such file"
    ) as caught:
        load("/no/such/libnccl.so")
    assert isinstance(caught.value, OSError)
    assert caught.value.searched[0] == ("/no/such/libnccl.so", "the path given")


def test_a_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "libnccl.so.2").write_text("not one")
    with pytest.raises(
        LibraryNotFoundError, match=r"cannot open .*libnccl.so.2(.|\n)*(invalid ELF|too short)"
    ):
        load(tmp_path / "libnccl.so.2")


def test_a_library_that_is_not_an_nccl_is_said_to_be_none(make: Make) -> None:
    path = make("libother.so", "int something(void) { return 0; }\n")
    with pytest.raises(LibraryNotFoundError, match=r"libother.so can be opened but .* has no ncclGetVersion"):
        load(path)


def test_a_library_whose_version_cannot_be_asked_is_an_error(make: Make) -> None:
    path = make("libbroken.so", "int ncclGetVersion(int *v) { return 3; }\n")
    with pytest.raises(Exception, match=r"ncclGetVersion: ncclInternalError \(3\)"):
        load(path)


@pytest.mark.parametrize("name", ["gloo", "NCCL", " host"])
def test_a_name_that_is_no_library_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"'{name}' is not a library.*'nccl', 'host', a path"):
        load(name)


def test_a_name_for_the_systems_loader_is_searched_there(make: Make) -> None:
    path = make("libvendor.so.1", release(23000))
    code = "import pynccl.abi as abi; lib = abi.load('libvendor.so.1'); print(lib.path, lib.kind)"
    assert python(code, LD_LIBRARY_PATH=str(path.parent)) == f"{path} other"
    with pytest.raises(LibraryNotFoundError, match=r"cannot open libvendor.so.1; .* needs ./libvendor.so.1"):
        load("libvendor.so.1")


def test_every_place_searched_for_libnccl_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = tuple((place, lambda: (None, "not there")) for place, _ in library.PLACES)
    monkeypatch.setattr(library, "PLACES", nowhere)
    with pytest.raises(LibraryNotFoundError, match="pip install nvidia-nccl-cu12") as caught:
        library.find_nccl.__wrapped__()
    assert caught.value.searched == tuple((place, "not there") for place, _ in nowhere)
    for place, _ in nowhere:
        assert f"\n  {place}: not there" in str(caught.value)


def test_the_places_are_the_process_then_pathfinder_then_the_environment_then_the_system() -> None:
    assert [place.split()[0].rstrip(",") for place, _ in library.PLACES] == [
        "already", "cuda-pathfinder", "NCCL_HOME", "the",
    ]  # fmt: skip


def test_an_nccl_that_the_process_already_has_is_used(make: Make) -> None:
    path = make("libnccl.so.2", release(22105))
    code = (
        f"import ctypes; ctypes.CDLL({str(path)!r}); import pynccl.abi as abi; print(abi.load('nccl').path)"
    )
    assert python(code) == str(path)


def test_nccl_home_is_searched(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOME", str(tmp_path))
    path, outcome = library._ask_environment()
    assert path is None and outcome.startswith(f"not in {tmp_path}/lib, {tmp_path}/lib64, ")
    (tmp_path / "lib64").mkdir()
    built = make("libnccl.so.2", release(22105)).rename(tmp_path / "lib64" / "libnccl.so.2")
    assert library._ask_environment() == (str(built), f"found {built}")


def test_a_pathfinder_that_fails_is_told_and_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    path, outcome = library._ask_pathfinder()
    assert path is None and outcome.startswith("not usable: ")


# --- which one ----------------------------------------------------------------------------------------------


def test_the_argument_wins_over_the_environment_and_the_environment_over_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "gpus", lambda: Gpus((Gpu(0, "H200", 1),)))
    assert library.choose() == ("nccl", "automatic: 1 CUDA device(s) usable, first H200")
    monkeypatch.setenv("PYNCCL_LIBRARY", "host")
    assert library.choose() == ("host", "asked for by the environment: PYNCCL_LIBRARY=host")
    assert library.choose("nccl") == ("nccl", "asked for by the caller: 'nccl'")
    monkeypatch.setenv("PYNCCL_LIBRARY", "")
    assert library.choose().name == "nccl"


def test_with_no_usable_device_the_host_library_is_chosen_and_the_reason_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "gpus", lambda: Gpus((), "the driver is asleep"))
    assert library.choose() == ("host", "automatic: no CUDA device is usable (the driver is asleep)")


def test_a_chosen_library_that_is_not_there_is_an_error_and_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYNCCL_LIBRARY", "/no/such/libnccl.so")
    with pytest.raises(LibraryNotFoundError, match="/no/such/libnccl.so"):
        load()


DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return INIT; }
int cuDriverGetVersion(int *v) { *v = 12080; return 0; }
int cuDeviceGetCount(int *n) { *n = COUNT; return 0; }
int cuDeviceGet(int *device, int index) { *device = 10 + index; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
  strcpy(name, device == 10 ? "first" : "second");
  return 0;
}
int cuDeviceTotalMem_v2(unsigned long *bytes, int device) { *bytes = 1ul << 36; return 0; }
int cuGetErrorName(int code, const char **name) {
  *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : 0;
  return code != 100;
}
"""


@pytest.mark.parametrize(
    ("init", "count", "expected"),
    [
        (0, 2, Gpus((Gpu(0, "first", 2**36), Gpu(1, "second", 2**36)), "", "12.8")),
        (0, 0, Gpus((), "the CUDA driver reports 0 devices", "12.8")),
        (100, 2, Gpus((), "cuInit failed: CUDA_ERROR_NO_DEVICE (100)")),
        (999, 2, Gpus((), "cuInit failed: CUDA error 999")),
    ],
)
def test_the_driver_is_asked_for_its_devices(make: Make, init: int, count: int, expected: Gpus) -> None:
    # Not named libcuda.so.1: it stays loaded, and would be the driver of every later test of this process.
    path = make("libdriver.so", DRIVER.replace("INIT", str(init)).replace("COUNT", str(count)))
    assert driver.probe(str(path)) == expected


def test_a_driver_that_is_missing_or_none_is_a_reason(make: Make) -> None:
    assert driver.probe("/no/such/libcuda.so.1").reason.startswith(
        "the CUDA driver cannot be opened: /no/such/"
    )
    path = make("libother.so", "int something(void) { return 0; }\n")
    assert driver.probe(str(path)).reason == f"{path} has no cuInit: not a CUDA driver"


# --- versions and layers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "text"),
    [(2708, "2.7.8"), (2804, "2.8.4"), (20906, "2.9.6"), (22105, "2.21.5"), (23203, "2.32.3")],
)
def test_version_codes_and_texts_are_inverse(code: int, text: str) -> None:
    assert version_string(code) == text
    assert version_code(text) == code


def test_every_since_is_a_version_not_after_the_header() -> None:
    assert version_code("2.29") == 22900
    assert all(2305 <= version_code(prototype.since) <= 23203 for prototype in PROTOTYPES.values())


def test_the_layer_imports_no_array_library() -> None:
    folder = Path(str(library.__file__)).parent
    sources = list(folder.glob("*.py"))
    assert len(sources) > 5
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"numpy", "cupy", "ml_dtypes"}, source


# --- the host library, as built -----------------------------------------------------------------------------


def test_the_host_library_is_found_has_every_function_and_its_own_name() -> None:
    lib: Library = load("host")
    assert (lib.kind, os.path.basename(lib.path)) == ("host", "libpynccl_host.so")
    assert lib.missing() == []
    assert lib.version == 23203
    assert lib.pyncclVersion().startswith(b"pynccl host library")
    assert [name for name in HOST_PROTOTYPES if not lib.has(name)] == []


def test_the_tables_are_the_host_librarys_own_header(repo: Path) -> None:
    text = (repo / "pynccl" / "host" / "src" / "nccl_abi.h").read_text()
    declared = re.findall(r"^NCCL_API [^(]*?(\w+)\(", text, flags=re.MULTILINE)
    assert sorted(declared) == sorted([*PROTOTYPES, *HOST_PROTOTYPES])


def test_what_has_no_meaning_in_host_memory_is_an_error_that_says_so() -> None:
    lib, uid, comm = load("host"), ncclUniqueId(), ctypes.c_void_p()
    check(lib, lib.ncclGetUniqueId(ctypes.byref(uid)), "ncclGetUniqueId")
    check(lib, lib.ncclCommInitRank(ctypes.byref(comm), 1, uid, 0), "ncclCommInitRank")
    psk = ncclEncryptionConfig_t.initializer(mode=EncryptionMode.PSK, psk="key")
    arguments = {
        "ncclCommSuspend": (comm, 1),
        "ncclCommResume": (comm,),
        "ncclSetEncryption": (ctypes.byref(psk),),
    }
    assert tuple(arguments) == coverage.NO_MEANING_IN_HOST_MEMORY
    for name, args in arguments.items():
        handle = comm.value if args[0] is comm else None
        with pytest.raises(InvalidUsageError, match=f"{name} has no meaning in host memory"):
            check(lib, getattr(lib, name)(*args), name, comm=handle)
    check(lib, lib.ncclCommDestroy(comm), "ncclCommDestroy")


def test_the_host_library_does_not_stand_in_for_libnccl_in_other_packages() -> None:
    code = """
import ctypes, os, pynccl.abi as abi
host = abi.load("host")
try: ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)
except OSError: print("not shadowed")
nccl = abi.load("nccl")
print(host.kind, nccl.kind, hasattr(ctypes.CDLL(None), "ncclGetVersion"))
"""
    assert python(code).splitlines() == ["not shadowed", "host nccl False"]
