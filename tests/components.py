"""Samplers and writers that follow engram's protocols and nothing else."""

import torch

from engram import Draw, WritePlan


class Listener:
    """A sampler that draws what it is told to, and notes what it hears and is asked."""

    def __init__(self, choose=None):
        self._choose = choose or (lambda extent, batch_size, key: Draw(torch.zeros(batch_size, dtype=torch.int64)))
        self.asked = []
        self.heard = []
        self.priorities = []

    def draw(self, extent, batch_size, key):
        self.asked.append((extent, batch_size, key))
        return self._choose(extent, batch_size, key)

    def observe(self, write, data):
        self.heard.append((None if write is None else write.rows.tolist(), data))

    def update_priority(self, index, priority, *, generation=None):
        self.priorities.append((index, priority, generation))

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


class Newest:
    """A sampler of the rows written last, from what it heard: the fifteen lines of a custom sampler."""

    def __init__(self):
        self._rows = []

    def draw(self, extent, batch_size, key):
        return Draw(torch.tensor(self._rows[-batch_size:]))

    def observe(self, write, data):
        self._rows = [] if write is None else self._rows + write.rows.tolist()

    def update_priority(self, index, priority, *, generation=None):
        pass

    def state_dict(self):
        return {"rows": list(self._rows)}

    def load_state_dict(self, state_dict):
        self._rows = list(state_dict["rows"])


class Backwards:
    """A writer that fills a buffer from its last row down, and then refuses."""

    def __init__(self):
        self.asked = []

    def place(self, extent, n, lane, data):
        self.asked.append((extent, n, lane, data))
        written = sum(n for _, n, _, _ in self.asked[:-1])
        if written + n > extent.capacity:
            self.asked.pop()
            raise RuntimeError("no room left")
        return WritePlan(rows=torch.arange(extent.capacity - 1 - written, extent.capacity - 1 - written - n, -1))
