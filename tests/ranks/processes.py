"""Jobs of real processes with gloo."""

import json
import os
import time
import traceback

from tests.forkserver import CONTEXT
from tests.waiting import Limit, until


def start(n, act, folder, *more):
    """``n`` processes that run ``act(ranks, rank, folder, *more)``; what each returns is in ``answer`` then."""
    folder.mkdir(exist_ok=True)
    return spawn(n, _run, act, folder, *more)


def spawn(n, main, *more):
    """``n`` processes that run ``main(rank, n, *more)``."""
    every = [CONTEXT.Process(target=main, args=(rank, n, *more)) for rank in range(n)]
    for process in every:
        process.start()
    return every


def run(n, act, folder, *more, timeout=100):
    """The answers of all, after they ended."""
    every = start(n, act, folder, *more)
    codes = join(every, timeout)
    return [answer(folder, rank) for rank in range(n)], codes


def join(every, timeout=100):
    """Exit codes, by the end of the time; whoever still runs then is killed, and the test fails."""
    limit = Limit(timeout)
    while any(process.is_alive() for process in every) and limit.left_s() > 0:
        time.sleep(0.003)
    hung = [rank for rank, process in enumerate(every) if process.is_alive()]
    for process in every:
        if process.is_alive():
            process.kill()
            process.join()
    assert not hung, f"ranks {hung} hang"
    return [process.exitcode for process in every]


def tell(file, text):
    """Write a file that others wait for: whoever sees it sees all of it."""
    half = file.with_name(f"{file.name}.half")
    half.write_text(text)
    half.rename(file)


def answer(folder, rank):
    """What a rank returned, or the text of what it raised; None: it said nothing."""
    file = folder / f"answer-{rank}.json"
    return json.loads(file.read_text()) if file.exists() else None


def wait_for(there, timeout=60):
    until(there, timeout)


def meet(folder, where, ranks):
    """Wait until all have come here; needs nobody after that."""
    (folder / f"{where}-{ranks.rank}").touch()
    wait_for(lambda: all((folder / f"{where}-{rank}").exists() for rank in range(ranks.world)))


def only_for_the_dead(ranks, alive, timeout):
    """What this rank waits for is short only once all who are ``alive()`` have come: on a slow machine, too, they are not missed."""
    real = ranks._wait

    def wait(keys, longer, over=None):
        if len(keys) < ranks.world:
            return real(keys, longer, over)
        wait_for(lambda: all(real([keys[rank]], 0.0)[0] is not None for rank in alive()))
        return real(keys, timeout if len(alive()) < ranks.world else longer, over)

    ranks._wait = wait


def stopped(pid):
    """Whether a process is, by a signal."""
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


def _run(rank, n, act, folder, *more):
    import torch
    from torch import distributed

    from engram import Ranks

    torch.set_num_threads(1)
    tell(folder / f"pid-{rank}", str(os.getpid()))
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=n)
    ranks = Ranks.from_torch(timeout=60.0)
    try:
        said = act(ranks, rank, folder, *more)
    except BaseException as error:
        said = {"error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()}
        tell(folder / f"answer-{rank}.json", json.dumps(said))
        raise
    tell(folder / f"answer-{rank}.json", json.dumps(said))
