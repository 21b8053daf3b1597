"""One copy of the data, two buffers: a critic draws by its errors, a world model draws windows.

What a sampler knows about rows is a named index of the storage: priorities for the critic, the ends of episodes for the
model. The rows are stored once. Both buffers draw what either of them writes, and every write updates both indexes.
"""

import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, PrioritizedSampler, SliceSampler, TensorDictReplayBuffer

ROWS, EPISODE, WINDOW = 1_000, 50, 8

storage = LazyTensorStorage(ROWS)
critic = TensorDictReplayBuffer(
    storage=storage, sampler=PrioritizedSampler(ROWS, alpha=1.0, beta=0.4, index="critic"), batch_size=256
)
model = TensorDictReplayBuffer(
    storage=storage, sampler=SliceSampler(slice_len=WINDOW, index="model"), batch_size=32 * WINDOW
)

# Written once, through either buffer: episodes of 50 steps, in which x goes from 0 to 0.98.
step = torch.arange(ROWS) % EPISODE
data = {"x": step / EPISODE, "next": {"done": (step == EPISODE - 1).unsqueeze(1)}}
critic.extend(TensorDict(data, batch_size=[ROWS]))
print(
    f"{len(critic)} rows for the critic, {len(model)} for the model, in one storage: {critic.storage is model.storage}"
)


def mean_drawn(buffer: TensorDictReplayBuffer) -> float:
    """The mean x of a buffer's samples."""
    return float(torch.cat([buffer.sample()["x"] for _ in range(50)]).mean())


print(f"before: the critic draws {mean_drawn(critic):.2f} on average, the model {mean_drawn(model):.2f}")

# The critic sets its errors as priorities; here they grow with x. That does not change what the model draws.
for _ in range(50):
    batch = critic.sample()
    batch["td_error"] = batch["x"]
    critic.update_tensordict_priority(batch)

print(f"after:  the critic draws {mean_drawn(critic):.2f} on average, the model {mean_drawn(model):.2f}")

windows = model.sample()["x"].view(-1, WINDOW)
unbroken = bool((windows.diff(dim=1) > 0).all())
print(f"the model draws {len(windows)} windows of {WINDOW} steps, each from one episode: {unbroken}")
