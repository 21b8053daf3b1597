"""Two buffers that do the same, of which one was saved and loaded on the way: they must not be told apart."""

import io
import random

import torch
from tensordict import TensorDict

from engram import ListStorage, NoSampleable, PrioritizedSampler, PrioritizedSliceSampler


def through_a_file(state):
    """The state after ``torch.save`` and ``torch.load(weights_only=True)``: tensors and plain values only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def by_state(rb, other):
    """Save one buffer and load it into another one."""
    other.load_state_dict(through_a_file(rb.state_dict()))


def bits(value):
    """What a value is, bit for bit, in a form that ``==`` compares: also NaN, and zeros of both signs."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1)
        return str(value.dtype), tuple(value.shape), bytes(raw.view(torch.uint8).numpy().tobytes())
    if isinstance(value, TensorDict):
        return tuple(value.batch_size), {key: bits(entry) for key, entry in value.items()}
    if isinstance(value, dict):
        return {key: bits(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [bits(entry) for entry in value]
    return value.hex() if isinstance(value, float) else value


def _ranks(numbers):
    """Tickets by their order alone: a load renews them."""
    order = {number: rank for rank, number in enumerate(sorted(set(numbers.flatten().tolist()) - {0}), start=1)}
    return [order.get(number, 0) for number in numbers.flatten().tolist()]


def timeless(rb):
    """All state that does not depend on when it was loaded."""
    state = rb.state_dict()
    state.pop("_default_rng")
    storage, sampler = state["_storage"], state["_sampler"]
    storage["writes"] = _ranks(storage.get("writes", storage["numbers"]))
    storage["numbers"] = _ranks(storage["numbers"])
    del storage["clock"]
    for epoch in (sampler, *storage.get("passes", {}).values()):  # by numbers of writes
        epoch.pop("begun", None), epoch.pop("known", None)
    if "version" in sampler:
        current = sampler.pop("version") == sampler.pop("clock")
        state["_sampler"] = (
            {**sampler, "current": True} if current else {"ran_out": sampler["ran_out"], "current": False}
        )
    return state


def contents(rb):
    """That state, bit for bit."""
    return bits(timeless(rb))


def rows(n, first=0, seed=0):
    """``n`` steps of trajectories of four, with ranks of which many are equal."""
    steps = torch.arange(first, first + n)
    noise = torch.Generator().manual_seed(seed * 1_000_003 + first)
    return TensorDict(
        {
            "obs": torch.rand(n, 3, generator=noise),
            "step": steps,
            "score": torch.randint(5, (n,), generator=noise).double() / 3,
            "episode": steps // 4,
            "next": {"done": (steps % 4 == 3).unsqueeze(-1), "reward": torch.rand(n, 1, generator=noise)},
        },
        batch_size=[n],
    )


class Twins:
    """Each step is done to both, and must have the same results. ``swap`` replaces one by a copy made of its state."""

    def __init__(self, make, *, seed=0, shape=None, lanes=1, edits=True, samples=(1, 8)):
        self._make = make
        self.pair = [make(), make()]
        for rb in self.pair:
            rb.set_rng(torch.Generator().manual_seed(seed))
        self.random = random.Random(seed)
        self._shape = shape
        self._lanes = lanes
        self._edits = edits
        self._samples = samples
        self._written = 0
        self._drawn = None

    def close(self):
        for rb in self.pair:
            rb.close()

    def swap(self, used=False, through=by_state):
        """Save, and load into a fresh buffer, or into one that was used for something else; ``through(rb, other)`` does that."""
        rb, twin = self.pair
        other = self._make()
        if used:
            other.extend(self._shaped(rows(5, 10_000)), lane=0 if self._lanes > 1 else None)
            if other.can_sample(self._samples[1]):
                other.sample(self._samples[1])
        through(twin, other)
        twin.close()
        self.pair = [rb, other]
        assert contents(rb) == contents(other)
        # What was drawn before the load is of another buffer now: its tickets match nothing.
        self._drawn = None

    def both(self, do):
        """The result on both, or what was raised; the same."""
        found = []
        for rb in self.pair:
            try:
                found.append(("returned", do(rb)))
            except (NoSampleable, RuntimeError, ValueError, IndexError) as error:
                found.append(("raised", type(error)))
        (how, one), (how_too, other) = found
        assert how == how_too, found
        if how == "raised":
            assert one is other
            return None
        assert bits(self._timeless(one)) == bits(self._timeless(other))
        return one, other

    def _timeless(self, result):
        """A result without the tickets, which are renewed by a load; their order stays."""
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            data, info = result
            info = {key: _ranks(v) if key == "index_generation" else v for key, v in info.items()}
            if isinstance(data, TensorDict):
                data = data.exclude("index_generation")
            return data, info
        return result

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _shaped(self, data):
        if self._shape is None:
            return data
        columns = self._shape
        n = data.batch_size[0] // columns * columns
        data = data[:n].reshape(n // columns, columns)
        data = data.permute(1, 0)
        data.batch_size = [columns, n // columns]
        return data

    def extend(self, n):
        n *= self._shape or 1
        data = self._shaped(rows(n, self._written))
        self._written += n
        lane = self.random.randrange(self._lanes) if self._lanes > 1 else None
        self.both(lambda rb: rb.extend(data, lane=lane))

    def sample(self):
        n = self.random.choice(self._samples)
        self._drawn = self.both(lambda rb: rb.sample(n, return_info=True)) or self._drawn

    def update(self):
        if self._drawn is None:
            return
        infos = [info for _, info in self._drawn]
        if "index_generation" not in infos[0] or "priority_weight" not in infos[0]:
            return
        n = len(infos[0]["index_generation"])
        priority = torch.rand(n, generator=torch.Generator().manual_seed(self.random.randrange(1 << 30))).double()
        priority[priority < 0.1] = 0
        for rb, info in zip(self.pair, infos, strict=True):
            index = info["index"]
            index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
            rb.update_priority(index, priority, generation=info["index_generation"])

    def anneal(self):
        value = self.random.random()
        for rb in self.pair:
            if isinstance(rb.sampler, PrioritizedSampler | PrioritizedSliceSampler):
                rb.sampler.beta = value

    def edit(self):
        size = len(self.pair[0])
        if not size or not self._edits:
            return
        rank, value = self.random.randrange(size), self.random.random()
        row = int(self.pair[0].storage.extent().rows(torch.tensor([rank]))[0])

        def do(rb):
            if isinstance(rb.storage, ListStorage):
                rb[row] = rows(1, 90_000 + row)[0]
                return
            rb.set_at_("score", torch.tensor([value], dtype=torch.float64), torch.tensor([row]))
            rb.mark_update(torch.tensor([row]))

        self.both(do)

    def empty(self):
        keep = self.random.random() < 0.5
        self.both(lambda rb: rb.empty(empty_write_count=keep))
        self._drawn = None

    def run(self, steps):
        moves = [
            lambda: self.extend(self.random.randint(1, 4)),
            self.sample,
            self.sample,
            self.update,
            self.anneal,
            self.edit,
        ]
        for _ in range(steps):
            self.random.choice(moves)()
            if self.random.random() < 0.005:
                self.empty()

    def check(self):
        assert contents(self.pair[0]) == contents(self.pair[1])
