"""The build step of the host library, and the tag of a wheel that carries it. Metadata: setup.cfg."""

import importlib.util
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


def load_host_build():
    """pynccl/host/build.py as a module of its own: importing the package would need its dependencies."""
    spec = importlib.util.spec_from_file_location("pynccl_host_build", HERE / "pynccl" / "host" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithHostLibrary(build_py):
    def run(self):
        super().run()
        host_build = load_host_build()
        if self.editable_mode:
            host_build.build()
        else:
            host_build.build(Path(self.build_lib).resolve() / "pynccl" / "host" / "lib")


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        """Any Python 3, this platform: ctypes reaches the libraries, so they depend on no Python ABI."""
        return "py3", "none", super().get_tag()[2]


class DistributionWithLibraries(Distribution):
    def has_ext_modules(self):
        return True


setup(
    cmdclass={"build_py": BuildWithHostLibrary, "bdist_wheel": PlatformWheel},
    distclass=DistributionWithLibraries,
)
