"""Shards that can only be read from the front (pipe:, http, s3, compressed): opened, retried, checked."""

from __future__ import annotations

import itertools
import logging
import signal
import tarfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

from shardclip.errors import UserError
from shardclip.training.data.index import NAME_ERRORS, SampleKey, split_name
from shardclip.training.data.ranges import file_system, store_errors
from shardclip.training.data.sources import RawSample, is_local

if TYPE_CHECKING:
    from webdataset.gopen import Pipe

log = logging.getLogger(__name__)

Item = TypeVar("Item")

END_MARK = bytes(1024)
"""A tar file ends with two blocks of zeros."""
STREAM_BYTES = 8 * 2**20
"""Bytes that are fetched from a store at once."""
OPENED_BY_WEBDATASET = ("pipe:", "http://", "https://", "ais://", "sftp://", "ftps://", "scp://", "hf://")


class Incomplete(OSError):
    """A shard whose end did not arrive."""


class Unreadable(OSError):
    """A shard that could not be read to its end, however often it was opened."""


class Readable(Protocol):
    """An open binary stream."""

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes, none at the end."""

    def close(self) -> None:
        """Let go of it."""


class Output:
    """All that a command prints, and only at its end whether it failed.

    webdataset's pipe asks for the exit status after each read, and raises in place of handing over what it
    has just read: where a broken shard ends would hang on which of the two processes was faster.
    """

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        # A shell that has become its command ends by the signal itself where webdataset expects 128 more.
        pipe.ignore_status.append(-signal.SIGPIPE)
        # A command that hangs would outlive the process that has stopped waiting for it. (What a shell has
        # started beside itself, the parts of a pipeline say, is out of reach.)
        weakref.finalize(self, _abandon, pipe)

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes of the output, none at its end."""
        content: bytes = self.pipe.stream.read(size)
        return content

    def close(self) -> None:
        """Wait for the command.

        Raises:
            OSError: it ended with an exit status that says that it failed.
        """
        self.pipe.close()


def _abandon(pipe: Pipe) -> None:
    """End a pipe's command if it still runs."""
    pipe.ignore_errors = True
    pipe.proc.kill()


class Checked:
    """Passes a stream on and remembers its last bytes, so that a missing end is noticed."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._tail = b""
        self._head = b""

    def read(self, size: int = -1) -> bytes:
        """The next bytes of the stream."""
        with store_errors():
            content = self._stream.read(size)
        if len(self._head) < 2:
            self._head = (self._head + content)[:2]
        self._tail = content[-1024:] if len(content) >= 1024 else (self._tail + content)[-1024:]
        return content

    def finish(self) -> None:
        """Read what is left and close.

        Raises:
            Incomplete: the tar's end mark is not there. (That of a compressed tar is its own to check.)
            OSError: the command or the connection reports a failure.
        """
        while self.read(2**16):
            pass
        self._stream.close()
        compressed = self._head in (b"\x1f\x8b", b"BZ", b"\xfd7")
        if not compressed and self._tail != END_MARK:
            raise Incomplete("the shard is cut short: its end mark is missing")


def open_stream(url: str) -> Readable:
    """An open stream of a local or remote file or of a `pipe:` command's output.

    Raises:
        UserError: a package that the protocol needs is not installed.
        OSError: it cannot be opened.
    """
    if url.startswith(OPENED_BY_WEBDATASET):
        from webdataset.gopen import gopen

        return Output(gopen(url, "rb"))
    if is_local(url):
        return open(url.removeprefix("file://"), "rb")
    with store_errors():
        system, path = file_system(url)
        return system.open(path, "rb", block_size=STREAM_BYTES, cache_type="readahead")


class Member(tarfile.TarInfo):
    """A member of a tar that only its end mark ends: tarfile takes a bad or cut header for the end too."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        """The member whose header comes next.

        Raises:
            EOFHeaderError: the end mark comes next.
            ReadError: neither comes next.
        """
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            where = tar.offset  # type: ignore[attr-defined]
            raise tarfile.ReadError(f"neither a member nor the end at byte {where}: {error}") from error


class RemoteShard:
    """The samples of one shard in the order in which they lie there."""

    def __init__(
        self, url: str, wanted: dict[str, tuple[str, ...]], rule: SampleKey, retries: int, pause: float = 1.0
    ) -> None:
        self.url = url
        self._wanted = wanted
        self._rule = rule
        self._retries = retries
        self._pause = pause
        self._roles = {suffix: role for role, names in wanted.items() for suffix in reversed(names)}
        self.suffixes: dict[str, None] = {}
        """Suffixes met so far, in order."""
        self.failure = ""
        """Why the last reading failed."""

    def samples(self, first: int = 0) -> Iterator[RawSample]:
        """The samples from number `first` on. After a failure the shard is opened again and gone on with;
        if that does not help, a last sample with a `problem` stands for what is missing."""
        try:
            yield from self._retried(self._read, first)
        except Unreadable:
            yield RawSample(short_name(self.url), problem="shard cannot be read to its end")

    def keys(self) -> Iterator[str]:
        """The key of each sample, by one reading of the members' names.

        Raises:
            Unreadable: it failed as often as is tried.
        """
        return self._retried(self._keys, 0)

    def _retried(self, read: Callable[[], Iterator[Item]], done: int) -> Iterator[Item]:
        """What `read` gives from number `done` on, each once, though it may have to begin again."""
        for attempt in range(self._retries + 1):
            try:
                for number, item in enumerate(read()):
                    if number >= done:
                        done = number + 1
                        yield item
                return
            except UserError:
                raise
            except (OSError, EOFError, tarfile.TarError, ValueError) as error:
                self.failure = _in_words(error)
                log.warning(
                    "%s: %s (attempt %d of %d)", self.url, self.failure, attempt + 1, self._retries + 1
                )
                if isinstance(error, FileNotFoundError):
                    break
                if attempt < self._retries:
                    time.sleep(self._pause * 2**attempt)
        raise Unreadable(self.failure)

    @contextmanager
    def _opened(self) -> Iterator[Checked]:
        """The shard's bytes; whoever is done with them has read them to a whole end."""
        stream = Checked(open_stream(self.url))
        try:
            yield stream
        except tarfile.TarError:
            stream.finish()  # a command or connection that failed says more of it than the tar that it broke
            raise
        stream.finish()

    def _members(self) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
        """One reading from the front of the wanted members, each with the open tar that stands at it."""
        # webdataset's iteration opens the tar itself and takes no class of members, so that it would end
        # without a word where a header is damaged or the connection was cut.
        with self._opened() as stream, _open_tar(stream) as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # the list would grow with the shard
                if member.isfile() and self._select(member.name):
                    yield tar, member

    def _keys(self) -> Iterator[str]:
        """One reading from the front of the samples' keys; a sample is members of one key in a row."""
        for key, _ in itertools.groupby(self._split(member.name)[0] for _, member in self._members()):
            yield key

    def _read(self) -> Iterator[RawSample]:
        """One reading from the front. webdataset groups the members: a sample is whole, and is given, when
        the next one or the tar's end has come."""
        from webdataset.tariterators import group_by_keys

        for sample in group_by_keys(self._files(), keys=self._split, handler=_note):
            raw = RawSample(f"{short_name(self.url)}:{sample['__key__']}")
            for role, suffixes in self._wanted.items():
                found = [sample[suffix] for suffix in suffixes if suffix in sample]
                if found:
                    raw.parts[role] = found[0]
            yield raw

    def _files(self) -> Iterator[dict[str, Any]]:
        """The wanted members with their content, as webdataset hands them on."""
        for tar, member in self._members():
            content = cast(IO[bytes], tar.extractfile(member)).read()
            yield {"fname": member.name, "data": content, "__url__": self.url}

    def _select(self, name: str) -> bool:
        """Whether a member is read at all."""
        split = split_name(name, self._rule)
        if split is not None and len(self.suffixes) < 100:
            self.suffixes.setdefault(split[1])
        return split is not None and split[1] in self._roles

    def _split(self, name: str) -> tuple[str, str]:
        split = split_name(name, self._rule)
        assert split is not None
        return split


def _open_tar(stream: Checked) -> tarfile.TarFile:
    """A tar, compressed or not, to be read from its front.

    Raises:
        ReadError: not even its beginning is there.
    """
    try:
        return tarfile.open(
            fileobj=cast(IO[bytes], stream), mode="r|*", tarinfo=Member, encoding="utf-8", errors=NAME_ERRORS
        )
    except TypeError as error:  # what tarfile makes of a gzip header that ends early
        raise tarfile.ReadError("cut short inside its first header") from error


def _in_words(error: Exception) -> str:
    """What a failure says of itself, without the system's number for it; its name if it says nothing."""
    words = error.strerror if isinstance(error, OSError) else None
    return words or str(error) or type(error).__name__


def _note(error: Exception) -> bool:
    """webdataset's handler for two members of one name: say so and go on with the next."""
    if not isinstance(error, ValueError):
        raise error
    log.warning("%s", error.args[0] if error.args else error)
    return True


def found_and_wanted(found: Iterable[str], wanted: Mapping[str, Sequence[str]]) -> str:
    """The suffixes of shards beside those that are read, for the message that there is no sample in them."""
    roles = "; ".join(f"{role}: {', '.join(names)}" for role, names in wanted.items())
    return f"suffixes found: {', '.join(found) or 'none'}; suffixes wanted: {roles}"


def short_name(url: str) -> str:
    """A shard's name for keys and messages: the last part of its path, of a command its end."""
    return url[-60:] if url.startswith("pipe:") else url.rsplit("/", 1)[-1]
