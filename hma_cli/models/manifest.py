"""The manifest of a converted checkpoint: which files it consists of, from which source, checked before each use."""

from __future__ import annotations

from hashlib import file_digest
from pathlib import Path

import msgspec

FILE_NAME = "hma-manifest.json"


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One file: bytes, modification time in nanoseconds, sha256 in hex."""

    name: str
    size: int
    mtime_ns: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """recipe: the version of the conversion that wrote the files. versions: of the packages that took part."""

    model: str
    recipe: int
    source_sha256: str
    versions: dict[str, str]
    files: tuple[FileRecord, ...]

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)


def write(directory: Path, *, model: str, recipe: int, source_sha256: str, versions: dict[str, str]) -> Manifest:
    """Checksum every file of `directory` (no subdirectories) and write the manifest beside them, as the last file."""
    manifest = Manifest(
        model=model,
        recipe=recipe,
        source_sha256=source_sha256,
        versions=versions,
        files=tuple(_record(path) for path in sorted(directory.iterdir()) if path.name != FILE_NAME),
    )
    encoded = msgspec.json.encode(manifest)
    (directory / FILE_NAME).write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")
    return manifest


def read(directory: Path) -> Manifest | None:
    """The manifest, or None where it is missing, unreadable or not valid."""
    try:
        return msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def damage(directory: Path, manifest: Manifest, *, full: bool) -> str:
    """What is wrong with the files, "" when nothing is.

    A file whose size and modification time are as recorded counts as intact; with `full`, or where only the time
    differs (a copied cache), its checksum decides.
    """
    for file in manifest.files:
        path = directory / file.name
        try:
            stat = path.stat()
            if stat.st_size != file.size:
                return f"{file.name} has {stat.st_size:,} bytes instead of {file.size:,}"
            if (full or stat.st_mtime_ns != file.mtime_ns) and _sha256(path) != file.sha256:
                return f"{file.name} has another checksum than when it was written"
        except FileNotFoundError:
            return f"{file.name} is missing"
        except OSError as error:
            return f"{file.name} cannot be read: {error.strerror or error}"
    return ""


def _record(path: Path) -> FileRecord:
    stat = path.stat()
    return FileRecord(name=path.name, size=stat.st_size, mtime_ns=stat.st_mtime_ns, sha256=_sha256(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
