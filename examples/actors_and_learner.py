"""Actors and a learner in separate processes over one prioritized buffer; one actor is killed on the way.

Actors walk along a cliff (the Blind Cliffwalk of Schaul et al., 2016). In every cell, one action leads on and the other over
the edge; only the end of the path has a reward. Informative rows are rare, so the learner draws by priority. The actors
choose by the learner's table of action values, which is in shared memory.
"""

import itertools
import os
import time
from collections.abc import Iterable

import torch
from tensordict import TensorDict
from torch import Tensor, multiprocessing

from engram import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

CELLS, ACTORS, ROWS, BATCH = 8, 2, 4_000, 32
KILL_AT, MOST_UPDATES = 1_000, 20_000
RATE, GAMMA, EXPLORE = 0.25, 0.9, 0.5
LEADS_ON = torch.arange(CELLS) % 2  # the right action of each cell


def act(replay: TensorDictPrioritizedReplayBuffer, values: Tensor, number: int, lane: int, learner: int) -> None:
    """Run an actor: walk until the learner has ended."""
    torch.set_num_threads(1)
    torch.manual_seed(number)
    cell = 0
    while os.getppid() == learner:
        explored = float(torch.rand(())) < EXPLORE
        action = int(torch.randint(2, ())) if explored else int(values[cell].argmax())
        safe = action == int(LEADS_ON[cell])
        end = not safe or cell == CELLS - 1
        row = {"cell": cell, "action": action, "reward": float(safe and end), "end": end, "actor": number}
        replay.add(TensorDict({name: torch.tensor(value) for name, value in row.items()}), lane=lane)
        cell = 0 if end else cell + 1
        time.sleep(0.001)  # real environments take time, too


def learn(replay: TensorDictPrioritizedReplayBuffer, values: Tensor) -> None:
    """Update the table once, then the priorities of the batch."""
    batch = replay.sample()
    cell, action = batch["cell"], batch["action"]
    following = values[(cell + 1) % CELLS].max(1).values
    error = batch["reward"] + GAMMA * following * ~batch["end"] - values[cell, action]
    values.index_put_((cell, action), RATE * batch["priority_weight"] * error / len(batch) ** 0.5, accumulate=True)
    batch["td_error"] = error.abs()
    replay.update_tensordict_priority(batch)


def wrote(replay: TensorDictPrioritizedReplayBuffer, actors: Iterable[int]) -> bool:
    """Whether the replay contains rows of each of these actors."""
    return len(replay) > 0 and set(actors) <= set(replay[:]["actor"].tolist())


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    replay = TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=LazyTensorStorage(ROWS, lanes=ACTORS), batch_size=BATCH, shared=True
    )
    values = torch.zeros(CELLS, 2).share_memory_()
    context = multiprocessing.get_context("fork")  # starts at once; "spawn" works, too

    def start(number: int, lane: int) -> multiprocessing.Process:
        actor = context.Process(target=act, args=(replay, values, number, lane, os.getpid()), daemon=True)
        actor.start()
        return actor

    actors = [start(lane, lane) for lane in range(ACTORS)]
    while len(replay) < BATCH or not wrote(replay, range(ACTORS)):
        time.sleep(0.01)
    for update in itertools.count(1):
        while replay.write_count < update:  # one update per row, however fast the learner is
            time.sleep(0.001)
        learn(replay, values)
        if update == KILL_AT:
            actors[0].kill()  # SIGKILL: it cannot clean up, and need not
            actors[0].join()
            left = int((replay[:]["actor"] == 0).sum())
            print(f"actor 0 was killed; its {left} rows stay, and the learner continues")
            actors[0] = start(ACTORS, 0)
        if update % 100 == 0:
            learned = bool((values.argmax(1) == LEADS_ON).all())
            joined = wrote(replay, [ACTORS])
            if (learned and joined) or update == MOST_UPDATES:
                break
    print(f"actor {ACTORS} writes in its lane: {joined}")
    print(f"{update} updates, {replay.write_count} rows written; the learner knows the way: {learned}")
    for actor in actors:
        actor.kill()
        actor.join()
    replay.close()


if __name__ == "__main__":
    main()
