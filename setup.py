"""Builds the CPU kernels at installation if there is a C++ compiler; installs without them otherwise.

All other package settings are in pyproject.toml. The build itself is in src/lancebill/backends/cpu/native/build.py,
which is loaded by path because lancebill cannot be imported yet.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path(__file__).parent / "src" / "lancebill" / "backends" / "cpu" / "native"


def _load_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lancebill_native_build", NATIVE / "build.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = _load_build()


class BuildKernels(build_ext):
    """Builds one shared library that is not a Python extension: a plain file name, and a warning if it fails."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / build.LIBRARY)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        if build.is_current(NATIVE / build.LIBRARY):  # built by an earlier install from this folder
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.resolve() != (NATIVE / build.LIBRARY).resolve():
                shutil.copyfile(NATIVE / build.LIBRARY, target)
            return
        try:
            build.build(target)
        except build.BuildFailed as error:
            self.warn(f"installing lancebill without its CPU kernels: {error}")

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]


class PlatformWheel(bdist_wheel):
    """A wheel for any Python 3, but for one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("lancebill.backends.cpu.native.kernels", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
