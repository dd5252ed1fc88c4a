"""Builds the C++ libraries at installation if there is a compiler; installs without them otherwise.

All other package settings are in pyproject.toml. The build itself is in src/lancebill/native/build.py, which is loaded
by path because lancebill cannot be imported yet.
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

BUILD = Path(__file__).parent / "src" / "lancebill" / "native" / "build.py"


def _load_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lancebill_native_build", BUILD)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = _load_build()
# A setuptools extension is a dotted name: that of the library's file, without its ending.
LIBRARIES = {
    ".".join((library.folder / Path(library.name).stem).relative_to(build.PACKAGE.parent).parts): library
    for library in build.LIBRARIES
}


class BuildLibraries(build_ext):
    """Builds shared libraries that are not Python extensions: plain file names, and a warning if it fails."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        library, target = LIBRARIES[ext.name], Path(self.get_ext_fullpath(ext.name))
        if library.is_current():  # built by an earlier install from this folder
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.resolve() != library.path.resolve():
                shutil.copyfile(library.path, target)
            return
        try:
            build.build(library, target)
        except build.BuildFailed as error:
            self.warn(f"installing lancebill without {library.name}: {error}")

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]


class PlatformWheel(bdist_wheel):
    """A wheel for any Python 3, but for one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension(name, sources=[], optional=True) for name in LIBRARIES],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
)
