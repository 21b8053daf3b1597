"""Folders as small archives that are the same for the same contents; and what of the contents is not the same twice."""

import io
import json
import re
import stat
import tarfile
from pathlib import Path

FOLDER = Path(__file__).parent

#: Names of attempts are random; so are, of a manifest, the digests of the shards that name them.
_ATTEMPT = re.compile(rb'(ckpt-\d+-e\d+-)[0-9a-f]{8}|("attempt":")[0-9a-f]{8}(?=")')
_OF_A_MANIFEST = re.compile(rb'("sum":"|"sha256":")[0-9a-f]+(?=")')

#: Of a control block: where the boot stands, and with it the namespace of process numbers; of each participant: its process, when
#: that began, and whose it is.
_BOOT, _BOOT_BYTES = 4096, 48
_PARTICIPANTS = range(12288 + 4, 12288 + 256 * 128, 128)
_PROCESS_BYTES = 16
#: Behind the participants, each lane: in it, which process appended last.
_LANES, _LANE_BYTES, _WRITER, _WRITER_BYTES = _PARTICIPANTS.stop, 64, 24, 8
#: What depends on the clock, and on who did what: the curve, the meter, and the samples of each participant.
_COUNTED = [(_BOOT + 1024, 3072), (8192 + 128, 576)] + [(at + 20, 8) for at in _PARTICIPANTS]


def forget_processes(store):
    """Of a store, forget which processes had it open, and since which boot of their machine; and what they have counted for people."""
    path = store / ".engram" / "control"
    control = bytearray(path.read_bytes())
    control[_BOOT : _BOOT + _BOOT_BYTES] = b"another boot".ljust(_BOOT_BYTES, b"\0")
    for at in _PARTICIPANTS:
        control[at : at + _PROCESS_BYTES] = bytes(_PROCESS_BYTES)
    for at in range(_LANES + _WRITER, len(control), _LANE_BYTES):
        control[at : at + _WRITER_BYTES] = bytes(_WRITER_BYTES)
    for at, nbytes in _COUNTED:
        control[at : at + nbytes] = bytes(nbytes)
    path.write_bytes(control)


def pack(folder):
    """A folder as an archive: names, modes, contents, and which files are links to others."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:xz", preset=9) as archive:
        for path in sorted(folder.rglob("*")):
            archive.add(path, str(path.relative_to(folder)), recursive=False, filter=_without_owner)
    return raw.getvalue()


def _without_owner(member):
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def unpack(raw, folder):
    """What was packed, in a new folder."""
    folder.mkdir(parents=True, mode=0o700)
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:xz") as archive:
        archive.extractall(folder, filter="fully_trusted")
    return folder


def golden(family):
    """The archive of a family of cases, a folder each; and what is found in them, by name."""
    return FOLDER / f"{family}.tar.xz", FOLDER / f"{family}.json"


def as_text(found):
    """What was found, as it lies in the file."""
    return re.sub(r"\[\s+([^][{}]*?)\s+\]", _on_one_line, json.dumps(found, indent=1)) + "\n"


def _on_one_line(match):
    return "[" + re.sub(r"\s*\n\s*", " ", match[1]) + "]"


def fixed(folder):
    """By name each file's mode, what it is a link to, and its bytes; zeros and dots stand for what is not the same twice."""
    found, first = {}, {}
    for path in sorted(folder.rglob("*")):
        name = _masked(_ATTEMPT, str(path.relative_to(folder)).encode()).decode()
        status = path.lstat()
        mode = stat.filemode(status.st_mode)
        if path.is_dir():
            found[name] = mode
        else:
            link = first.setdefault(status.st_ino, name)
            found[name] = mode, None if link == name else link, _without_chance(path)
    return found


def _without_chance(path):
    raw = path.read_bytes()
    if path.name == "maker":
        return bytes(len(raw))
    if path.name in ("manifest.json", "shard.json", "attempt.json", "LATEST"):
        raw = _masked(_ATTEMPT, raw)
    return _masked(_OF_A_MANIFEST, raw) if path.name == "manifest.json" else raw


def _masked(pattern, raw):
    return pattern.sub(lambda match: b"".join(group or b"" for group in match.groups()) + b"........", raw)
