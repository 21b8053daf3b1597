"""One copy of the data, two buffers: a critic and a world model each replay what they are worst at.

Priorities belong to the storage, under a name. Two samplers with different names keep their priorities apart, while the
rows are there once and what one buffer writes, both draw.
"""

import logging

import torch
from tensordict import TensorDict

from engram import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer

ROWS = 1_000
logging.getLogger("engram").setLevel("WARNING")  # say nothing of what is allocated

storage = LazyTensorStorage(ROWS)
critic = TensorDictReplayBuffer(
    storage=storage,
    sampler=PrioritizedSampler(ROWS, alpha=1.0, beta=0.4, index="critic"),
    priority_key="td_error",
    batch_size=256,
)
model = TensorDictReplayBuffer(
    storage=storage,
    sampler=PrioritizedSampler(ROWS, alpha=1.0, beta=0.4, index="model"),
    priority_key="model_error",
    batch_size=256,
)

# Written once, through either buffer. Rows are observations x in [0, 1); new rows have the same priority for both.
x = torch.linspace(0, 1, ROWS + 1)[:ROWS, None]
critic.extend(TensorDict({"observation": x}, batch_size=[ROWS]))
print(
    f"{len(critic)} rows for the critic, {len(model)} for the model, in one storage: {critic.storage is model.storage}"
)


def mean_drawn(buffer: TensorDictReplayBuffer) -> float:
    """Where a buffer's samples are, on average."""
    return float(torch.cat([buffer.sample()["observation"] for _ in range(50)]).mean())


print(f"before: the critic draws {mean_drawn(critic):.2f} on average, the model {mean_drawn(model):.2f}")

# Each learns, and says how wrong it was: here the critic is wrong where x is large, the model where x is small.
for _ in range(50):
    batch = critic.sample()
    batch["td_error"] = batch["observation"].squeeze(1)
    critic.update_tensordict_priority(batch)
    batch = model.sample()
    batch["model_error"] = 1 - batch["observation"].squeeze(1)
    model.update_tensordict_priority(batch)

print(f"after:  the critic draws {mean_drawn(critic):.2f} on average, the model {mean_drawn(model):.2f}")
