"""The build step of the host library, and the tag of a wheel that carries it. Metadata: setup.cfg."""

import subprocess
import sys
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

BUILD_SCRIPT = Path(__file__).resolve().parent / "pynccl" / "host" / "build.py"


class BuildHostLibrary(Command):
    """A step beside build_py, not in it: in an editable install setuptools only warns of errors there."""

    user_options = [("build-lib=", None, "folder of the built packages")]
    editable_mode = False

    def initialize_options(self):
        self.build_lib = None

    def finalize_options(self):
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self):
        out = [] if self.editable_mode else ["--out", f"{self.build_lib}/pynccl/host/lib"]
        status = subprocess.run([sys.executable, str(BUILD_SCRIPT), *out]).returncode
        if status:
            raise SystemExit(status)  # the script has said what is wrong

    # What setuptools asks of a build step; the packages' own files are build_py's to report.
    def get_source_files(self):
        return []

    def get_outputs(self):
        return []

    def get_output_mapping(self):
        return {}


class BuildAll(build):
    sub_commands = [*build.sub_commands, ("build_host_library", None)]


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        """Any Python 3, this platform: ctypes reaches the libraries, so they depend on no Python ABI."""
        return "py3", "none", super().get_tag()[2]


class DistributionWithLibraries(Distribution):
    def has_ext_modules(self):
        return True


setup(
    cmdclass={"build": BuildAll, "build_host_library": BuildHostLibrary, "bdist_wheel": PlatformWheel},
    distclass=DistributionWithLibraries,
)
