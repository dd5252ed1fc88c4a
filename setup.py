"""Builds the C++ libraries at installation if there is a compiler; installs without them otherwise.

All other package settings are in pyproject.toml. The build itself is in src/lancebill/native/build.py, which is loaded
by path because lancebill cannot be imported yet.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Distribution, Extension, setup
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
        everywhere = not self.editable_mode  # a wheel may be installed on another machine
        if library.is_current(everywhere):  # built by an earlier install from this folder
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.resolve() != library.path.resolve():
                shutil.copyfile(library.path, target)
            return
        try:
            build.build(library, target, everywhere=everywhere)
        except build.BuildFailed as error:
            self.warn(f"installing lancebill without {library.name}: {error}")

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if Path(path).exists()]


class PlatformWheel(bdist_wheel):
    """A wheel for any Python 3, but for one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]

    def write_wheelfile(self, wheelfile_base: str, *words: str) -> None:
        """Also write what the wheel contains and depends on, where PEP 770 puts it."""
        super().write_wheelfile(wheelfile_base, *words)
        folder = Path(wheelfile_base) / "sboms"
        folder.mkdir(exist_ok=True)
        text = json.dumps(_bill_of_materials(self.distribution, Path(self.bdist_dir)), indent=1)
        (folder / "lancebill.cdx.json").write_text(text + "\n", encoding="utf-8")


def _bill_of_materials(distribution: Distribution, contents: Path) -> dict[str, Any]:
    """CycloneDX: the binaries in the wheel with their hashes, and the packages that it requires."""
    name, version = distribution.get_name(), distribution.get_version()
    binaries = sorted(file for file in contents.rglob("*") if file.suffix in (".so", ".kernel"))
    files = [
        {
            "type": "file",
            "name": file.relative_to(contents).as_posix(),
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()}],
        }
        for file in binaries
    ]
    required = {re.split(r"[^\w.-]", line)[0]: line for line in distribution.install_requires}
    packages = [
        {"type": "library", "name": package, "purl": f"pkg:pypi/{package}", "description": f"requires {line}"}
        for package, line in required.items()
    ]
    component = {"type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component},
        "components": [*files, *packages],
    }


setup(
    ext_modules=[Extension(name, sources=[], optional=True) for name in LIBRARIES],
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": PlatformWheel},
)
