"""Coverage-guided fuzzing of all that reads bytes from a peer. Needs ``pip install atheris``.

python scripts/fuzz_wire.py [libFuzzer options, e.g. -max_total_time=60] [corpus directory]

Any exception other than the documented ones is a finding. The corpus is kept in build/fuzz_wire
unless another directory is named; it starts from the example frames of the protocol.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

with atheris.instrument_imports(include=["kvnixl"]):
    from kvnixl import compat, metadata, wire
    from kvnixl.errors import CompatibilityError, HandshakeRefusedError, WireError

MINE = compat.CompatibilityCheck({"model": "m"})


def check_factors(data: bytes) -> None:
    """A peer whose hash really is that of the factors it sends."""
    text = data.decode("utf-8", "replace")
    claimed = hashlib.sha256(text.encode()).hexdigest()
    MINE.check(claimed, metadata.KvNixlExtension(incarnation=1, factors=text))


READERS = (
    wire.decode_get_meta,
    wire.decode_handshake_payload,
    wire.decode_agent_metadata,
    wire.decode_clock,
    wire.peek_extension,
    wire.parse_notification,
    lambda data: wire.parse_notification(b"PUSH_REG:" + data),
    lambda data: wire.open_handshake([data], MINE),
    lambda data: wire.open_handshake([data, wire.encode_clock(1.0)], MINE),
    lambda data: metadata.parse_lease(data.decode("utf-8", "replace")),
    check_factors,
)


def read_everything(data: bytes) -> None:
    for read in READERS:
        with contextlib.suppress(WireError, CompatibilityError, HandshakeRefusedError):
            read(data)


def main() -> None:
    arguments = list(sys.argv)
    if all(argument.startswith("-") for argument in arguments[1:]):
        corpus = ROOT / "build" / "fuzz_wire"
        corpus.mkdir(parents=True, exist_ok=True)
        for frame in (ROOT / "tests" / "data" / "wire").glob("*.hex"):
            (corpus / frame.stem).write_bytes(bytes.fromhex(frame.read_text(encoding="ascii")))
        arguments.append(str(corpus))
    atheris.Setup(arguments, read_everything)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
