"""A port over a folder, which all processes of a machine share and none takes with it: a file per key, put by renaming.

Not durable against the death of a machine, and no store: what the tests of the whole of TransferQueue run over.
"""

import hashlib
import os
import tempfile
from pathlib import Path


class FolderPort:
    """Holds bytes by key in the files of a folder, which is made."""

    def __init__(self, path):
        self.path = str(path)
        Path(path).mkdir(parents=True, exist_ok=True)

    def file(self, key):
        return Path(self.path, hashlib.sha256(key.encode()).hexdigest())

    def put(self, keys, payloads):
        for key, payload in zip(keys, payloads, strict=True):
            descriptor, name = tempfile.mkstemp(dir=self.path)
            with os.fdopen(descriptor, "wb") as file:
                file.write(payload)
            Path(name).replace(self.file(key))

    def get(self, keys):
        missing = [key for key in keys if not self.file(key).exists()]
        if missing:
            raise KeyError(missing)
        return [memoryview(bytearray(self.file(key).read_bytes())) for key in keys]

    def clear(self, keys):
        for key in keys:
            self.file(key).unlink(missing_ok=True)

    def close(self):
        pass
