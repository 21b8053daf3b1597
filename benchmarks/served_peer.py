"""A client of a server of engram's, as a process of its own: what ``reverb_peer`` is of Reverb.

``python -m benchmarks.served_peer ROLE ADDRESS TOKEN``. ``sample`` draws batches of 256 ahead, as a learner does; ``one-by-one`` waits for
each. ``write`` writes 64 rows at a time, streams, and waits for its acknowledgements at the end of a window; ``single`` so one row at a
time, and ``numbered``, which is told their numbers.
"""

import sys
import warnings
from functools import partial

from benchmarks import data, rows_of_actors
from benchmarks.workers import answer_lines

CHUNK, BATCH, PREFETCH = 64, 256, 4


def main(role: str, address: str, token: str) -> None:
    from engram import ReplayBuffer

    warnings.simplefilter("ignore")
    if role == "write":
        remote = ReplayBuffer.connect(address, token=token, full="block")
        chunks = data.pieces(data.fields(200 * CHUNK), CHUNK)
        answer_lines(data.each(remote.extend, chunks), partial(len, remote), {})
    elif role in ("single", "numbered"):
        remote = ReplayBuffer.connect(address, token=token, full="block", own_lanes=role == "numbered")
        answer_lines(partial(remote.add, rows_of_actors.row()), partial(len, remote), {})
    else:
        prefetch = PREFETCH if role == "sample" else 0
        remote = ReplayBuffer.connect(address, token=token, prefetch=prefetch, batch_size=BATCH)
        if remote.sample()["a"].shape != (BATCH, 3, 4):
            raise ValueError("served_peer: expected batches of 256 rows.")
        answer_lines(remote.sample, None, {})
    remote.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
