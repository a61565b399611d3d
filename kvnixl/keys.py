"""CurveZMQ keys for the side channel.

``python -m kvnixl.keys DIR`` makes a key pair for servers and one for clients. Of each pair NAME,
``DIR/NAME.key`` holds the public key and ``DIR/NAME.key_secret`` both; the latter is readable by
its owner only and belongs on the machines that play that role. The files have the certificate
format of ``zmq.auth``.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import stat
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvnixl.errors import ConfigError, KvNixlError

__all__ = [
    "CurveClientKeys",
    "CurveServerKeys",
    "KeyPair",
    "generate_key_pair",
    "load_allowed_clients",
    "load_public_key",
    "load_secret_key",
    "write_key_pair",
]

logger = logging.getLogger(__name__)

PUBLIC_SUFFIX = ".key"
SECRET_SUFFIX = ".key_secret"

_MAX_FILE_BYTES = 16 * 1024
_Z85_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_ENTRY = re.compile(r'^\s*(public-key|secret-key)\s*=\s*["\']?([^"\'\s]*)["\']?\s*$', re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CurveZMQ key pair, each key as 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CurveServerKeys:
    """What a side-channel server needs to encrypt.

    Attributes:
        pair: the server's own keys.
        allowed_clients: public keys of the clients that may ask; ``None`` lets every client in
            that knows the server's public key.
    """

    pair: KeyPair
    allowed_clients: frozenset[bytes] | None = None


@dataclass(frozen=True, slots=True)
class CurveClientKeys:
    """What a side-channel client needs to encrypt.

    Attributes:
        pair: the client's own keys.
        server_public: public key of the servers it asks.
    """

    pair: KeyPair
    server_public: bytes


def generate_key_pair() -> KeyPair:
    """A new random key pair. Raises `ConfigError` if libzmq was built without CURVE."""
    import zmq

    if not zmq.has("curve"):
        raise ConfigError(
            f"libzmq {zmq.zmq_version()} was built without CURVE: install a pyzmq wheel from PyPI"
        )
    public, secret = zmq.curve_keypair()
    return KeyPair(public, secret)


def write_key_pair(directory: str | os.PathLike[str], name: str, pair: KeyPair) -> Path:
    """Write ``NAME.key`` and ``NAME.key_secret`` (mode 0600) into ``directory``.

    The directory is made if needed (mode 0700). Existing files are never overwritten.

    Returns:
        The path of the secret file.

    Raises:
        ConfigError: the name is no plain file name.
        FileExistsError: one of the files exists.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"key name {name!r}: use letters, digits, '.', '_' and '-'")
    directory = Path(directory)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    public = f'    public-key = "{pair.public.decode()}"\n'
    secret = f'    secret-key = "{pair.secret.decode()}"\n'
    secret_path = directory / (name + SECRET_SUFFIX)
    public_path = directory / (name + PUBLIC_SUFFIX)
    if public_path.exists():
        raise FileExistsError(f"{public_path} exists: remove it to make a new key")
    _write_private(secret_path, f"# CurveZMQ secret key of {name}\ncurve\n{public}{secret}")
    _write_private(public_path, f"# CurveZMQ public key of {name}\ncurve\n{public}")
    return secret_path


def load_public_key(path: str | os.PathLike[str]) -> bytes:
    """The public key in a key file. Raises `ConfigError`, naming the file."""
    return _read_entries(path)["public-key"]


def load_secret_key(path: str | os.PathLike[str]) -> KeyPair:
    """The key pair in a ``.key_secret`` file.

    Warns if others than its owner may read the file. Raises `ConfigError`, naming the file.
    """
    entries = _read_entries(path)
    if "secret-key" not in entries:
        raise ConfigError(f"{path} holds no secret key: name the {SECRET_SUFFIX} file")
    pair = KeyPair(entries["public-key"], entries["secret-key"])
    import zmq

    if zmq.has("curve") and zmq.curve_public(pair.secret) != pair.public:
        raise ConfigError(f"{path}: the public key does not belong to the secret key")
    if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
        logger.warning("%s can be read by others than its owner: chmod 600 it", path)
    return pair


def load_allowed_clients(directory: str | os.PathLike[str]) -> frozenset[bytes]:
    """The public keys in all ``.key`` files of a directory.

    Raises:
        ConfigError: no such directory, no key in it, or a file that is none.
    """
    paths = sorted(Path(directory).glob("*" + PUBLIC_SUFFIX))
    if not paths:
        raise ConfigError(f"{directory} holds no {PUBLIC_SUFFIX} file of a client")
    return frozenset(load_public_key(path) for path in paths)


def _write_private(path: Path, text: str) -> None:
    # O_EXCL with the mode given at creation: the key is never readable by others, not even briefly.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)


def _read_entries(path: str | os.PathLike[str]) -> dict[str, bytes]:
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"key file {path} cannot be read: {error.strerror}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than a key file")
    entries = {}
    for name, value in _ENTRY.findall(content.decode("utf-8", "replace")):
        key = value.encode()
        if not _Z85_KEY.fullmatch(key):
            raise ConfigError(f"{path}: {name} is not 40 characters of Z85")
        entries[name] = key
    if "public-key" not in entries:
        raise ConfigError(f"{path} holds no public key: make keys with 'python -m kvnixl.keys DIR'")
    return entries


def _make_keys(directory: Path, names: Iterable[str]) -> None:
    for name in names:
        path = write_key_pair(directory, name, generate_key_pair())
        print(f"{path.with_suffix(PUBLIC_SUFFIX)}\n{path}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvnixl.keys",
        description="Make CurveZMQ key pairs for kvnixl's side channel.",
    )
    parser.add_argument("directory", type=Path, help="where the key files go")
    parser.add_argument(
        "names",
        nargs="*",
        default=["server", "client"],
        help="names of the pairs to make (default: server client)",
    )
    arguments = parser.parse_args(argv)
    try:
        _make_keys(arguments.directory, arguments.names)
    except (KvNixlError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
