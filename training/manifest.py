"""What a folder of shards says of its videos: which shard the last encoding of each made, and who is encoding what.

`manifest.jsonl` has a line for every change; the last line of a source counts. Lines are appended under a lock, so
that a process that is killed at any moment leaves at most a line without its end, which is ignored. It is rewritten as
a whole, to a new file that then takes its place, once most of its lines are out of date.

A source is a video file. It is recognised by its path or, where its folder was copied or renamed, by its name in the
data set and its content.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "manifest.jsonl"
LOCKS = ".locks"
UNFINISHED = ".tmp"

UNLOCKABLE = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
"""What a file system without locks says. Two encoders there may do the same work twice, and write the same shard."""


@dataclass(frozen=True)
class Entry:
    """What the last encoding made of a source: a shard, or nothing for a reason, or nothing yet."""

    source: str  # its absolute path
    name: str  # what its clips are called, before the number of their first frame
    root: str  # the folder that it was listed in
    stat: tuple[int, ...] = ()  # what tells that the file is untouched, so that its content is not read again
    content: str = ""  # digest of all its bytes
    request: str = ""  # digest of all that a shard's content depends on: content, name, caption and options
    shard: str | None = None  # file name
    reason: str | None = None  # why there is no shard

    @property
    def is_pending(self) -> bool:
        return self.shard is None and self.reason is None


class Manifest:
    """The entries of a folder, and why which requests have no shard.

    Raises:
        OSError: the folder cannot be written, or read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self.reasons: dict[str, str] = {}
        self._position, self._inode, self._lines = 0, -1, 0
        self.refresh()

    def refresh(self) -> None:
        """Take in what other processes have written."""
        try:
            with open(self.folder / FILE, "rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._position, self._inode, self._lines = 0, inode, 0
                    self.entries, self.reasons = {}, {}
                file.seek(self._position)
                added = file.read()
        except FileNotFoundError:
            return
        whole = added[: added.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.splitlines():
            self._lines += 1
            # A killed writer's unfinished line, which the next one ended.
            with contextlib.suppress(ValueError, TypeError, KeyError):
                self._take(json.loads(line))

    def _take(self, line: dict[str, object]) -> None:
        if "forget" in line:
            self.entries.pop(str(line["forget"]), None)
            return
        if line.get("reason") and line.get("request"):
            self.reasons[str(line["request"])] = str(line["reason"])
        if "source" in line:
            line = {**line, "stat": tuple(line.get("stat", ()))}  # type: ignore[arg-type]
            self.entries[str(line["source"])] = Entry(**line)  # type: ignore[arg-type]

    def append(self, *changes: Entry | str) -> None:
        """Add entries; a string is the path of a source to forget."""
        with self.locked():
            self.refresh()
            self.write(*changes)

    def write(self, *changes: Entry | str) -> None:
        """`append`, for who holds the lock and has refreshed. Nothing is written for what is there already."""
        lines: list[dict[str, object]] = []
        for change in changes:
            if isinstance(change, str) and change in self.entries:
                lines.append({"forget": change})
            elif isinstance(change, Entry) and self.entries.get(change.source) != change:
                lines.append(_without_defaults(change))
        if not lines:
            return
        text = "".join(json.dumps(line) + "\n" for line in lines)
        with open(self.folder / FILE, "ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a writer was killed
                    text = "\n" + text
            file.write(text.encode())
        self.refresh()
        if self._lines > 1000 + 4 * (len(self.entries) + len(self.reasons)):
            self._rewrite()

    def _rewrite(self) -> None:
        lines: list[dict[str, object]] = [{"request": key, "reason": reason} for key, reason in self.reasons.items()]
        lines += [_without_defaults(entry) for entry in self.entries.values()]
        with replacing(self.folder / FILE) as path:
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.refresh()

    def locked(self) -> contextlib.AbstractContextManager[bool]:
        return lock(self.folder / LOCKS / "manifest")

    def claim(self, source: str, *, wait: bool) -> contextlib.AbstractContextManager[bool]:
        """Yields whether this process alone now encodes `source`; if not `wait`, at once."""
        digest = hashlib.sha256(os.fsencode(source)).hexdigest()[:32]
        return lock(self.folder / LOCKS / digest, wait=wait)


def _without_defaults(entry: Entry) -> dict[str, object]:
    return {name: value for name, value in asdict(entry).items() if value}


@contextlib.contextmanager
def lock(path: Path, *, wait: bool = True, shared: bool = False) -> Iterator[bool]:
    """Holds a lock that ends with the process, however it ends; yields whether it is held.

    Args:
        wait: until others have released it.
        shared: with all who ask for it like this.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            os.close(file)
            if error.errno not in UNLOCKABLE and not isinstance(error, BlockingIOError):
                raise
            yield not isinstance(error, BlockingIOError)
            return
        # The holder before may have removed the file that was waited for, and another made one anew.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(file).st_ino:
                break
        os.close(file)
    try:
        yield True
    finally:
        if not shared:  # others may hold this very file
            path.unlink(missing_ok=True)
        os.close(file)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields where to write a file that takes the place of `path`, flushed to disk, if the block succeeds.

    Nobody ever sees half of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{uuid.uuid4().hex}{UNFINISHED}")
    try:
        with open(unfinished, "xb") as held:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield unfinished
            with open(unfinished, "rb") as written:
                os.fsync(written.fileno())
            os.replace(unfinished, path)
        flush_folder(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes were writing there: what no living process holds, and is a minute old."""
    for path in folder.glob(f".*{UNFINISHED}"):
        with contextlib.suppress(OSError):  # it is held, or another process removes it
            if time.time() - path.stat().st_mtime > 60:
                with open(path, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def digest_of(value: object) -> str:
    """A digest of something that JSON can say."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def content_of(path: str | os.PathLike[str]) -> str:
    """A digest of all bytes of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
